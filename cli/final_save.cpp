#include "cli/final_save.h"

#include <unistd.h>

#include <filesystem>
#include <optional>
#include <system_error>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

// Why not; nothing: it was saved.
std::optional<std::string> try_save(const std::string& path,
                                    const std::function<void(const std::string&)>& save) {
  try {
    save(path);
    return std::nullopt;
  } catch (const IoError& error) {
    return error.what();
  } catch (const ConfigError& error) {  // another rank's refusal
    return error.what();
  }
}

}  // namespace

std::vector<std::string> rescue_paths(const std::string& path) {
  // A directory may be named with a '/' behind it.
  const std::filesystem::path named(path);
  const std::filesystem::path last = named.has_filename() ? named : named.parent_path();
  const std::string name = last.filename().string() + ".rescued-" + std::to_string(::getpid());
  std::vector<std::string> paths;
  std::error_code error;
  const std::filesystem::path here = std::filesystem::current_path(error);
  // Also where that is unknown: all ranks try as many paths.
  paths.push_back((error ? std::filesystem::path(".") : here) / name);
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
  paths.push_back((error ? std::filesystem::path("/tmp") : temporary) / name);
  return paths;
}

RescuedSave save_or_rescue(const SaveTarget& target,
                           const std::function<void(const std::string& path)>& save) {
  const std::optional<std::string> failure = try_save(target.path, save);
  if (!failure) {
    return {target.path, ""};
  }
  std::string others;
  for (const std::string& place : rescue_paths(target.path)) {
    const std::optional<std::string> again = try_save(place, save);
    if (!again) {
      return {place, detail::concat(target.flag, ": ", *failure, "; ", target.what, " saved in ",
                                    in_quotes(place), " instead")};
    }
    others += "; " + *again;
  }
  return {"", detail::concat(target.flag, ": ", *failure,
                             "; it could not be saved anywhere else either", others)};
}

}  // namespace tessera::cli
