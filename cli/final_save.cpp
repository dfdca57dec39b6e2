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
  const std::string name =
      std::filesystem::path(path).filename().string() + ".rescued-" + std::to_string(::getpid());
  std::vector<std::string> paths;
  std::error_code error;
  const std::filesystem::path here = std::filesystem::current_path(error);
  // Also where that is unknown: all ranks try as many paths.
  paths.push_back((error ? std::filesystem::path(".") : here) / name);
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
  paths.push_back((error ? std::filesystem::path("/tmp") : temporary) / name);
  return paths;
}

SaveOutcome save_or_rescue(const std::string& path,
                           const std::function<void(const std::string&)>& save) {
  const std::optional<std::string> failure = try_save(path, save);
  if (!failure) {
    return {path, ""};
  }
  std::string others;
  for (const std::string& place : rescue_paths(path)) {
    const std::optional<std::string> again = try_save(place, save);
    if (!again) {
      return {place, detail::concat("--save: ", *failure, "; the parameters are saved in ",
                                    in_quotes(place), " instead")};
    }
    others += "; " + *again;
  }
  return {"", detail::concat("--save: ", *failure, "; they could not be saved anywhere else either",
                             others)};
}

}  // namespace tessera::cli
