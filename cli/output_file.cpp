#include "cli/output_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/core/link_target.h"
#include "tessera/core/printable.h"

namespace tessera::cli {

void check_output_file(const std::string& flag, const std::filesystem::path& named) {
  const std::filesystem::path path = link_target(named.string());
  std::error_code ignored;
  TESSERA_CHECK(path.has_filename() && !std::filesystem::is_directory(path, ignored), ConfigError,
                flag, " ", tessera::in_quotes(path.string()), " is not a file name");
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  TESSERA_CHECK(std::filesystem::is_directory(folder, ignored), ConfigError, flag, " ",
                tessera::in_quotes(path.string()), ": there is no directory ",
                tessera::in_quotes(folder.string()), "; create it first");
  TESSERA_CHECK(::access(folder.c_str(), W_OK | X_OK) == 0, ConfigError, flag, " ",
                tessera::in_quotes(path.string()), ": directory ",
                tessera::in_quotes(folder.string()), " is not writable");
}

void check_output_directory(const std::string& flag, const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path nearest = fs::absolute(directory, ignored).lexically_normal();
  while (!fs::exists(nearest, ignored) && nearest.has_relative_path()) {
    nearest = nearest.parent_path();
  }
  TESSERA_CHECK(fs::is_directory(nearest, ignored), ConfigError, flag, " ",
                tessera::in_quotes(directory), ": ", tessera::in_quotes(nearest.string()),
                " is not a directory; name one, or one that can be created");
  TESSERA_CHECK(::access(nearest.c_str(), W_OK | X_OK) == 0, ConfigError, flag, " ",
                tessera::in_quotes(directory), ": directory ", tessera::in_quotes(nearest.string()),
                " is not writable");
}

void write_output_file(const std::filesystem::path& named, std::string_view text) {
  const std::filesystem::path path = link_target(named.string());
  const std::string beside = path.string() + ".partial-" + std::to_string(::getpid());
  std::FILE* const file = std::fopen(beside.c_str(), "wxe");
  TESSERA_CHECK(file != nullptr, IoError, "cannot create ", tessera::in_quotes(beside), ": ",
                std::strerror(errno));
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  written = std::fflush(file) == 0 && written && ::fsync(::fileno(file)) == 0;
  written = std::fclose(file) == 0 && written;
  if (!written || std::rename(beside.c_str(), path.c_str()) != 0) {
    const int error = errno;
    std::remove(beside.c_str());
    throw IoError(detail::concat("cannot write ", tessera::in_quotes(path.string()), ": ",
                                 std::strerror(error)));
  }
}

}  // namespace tessera::cli
