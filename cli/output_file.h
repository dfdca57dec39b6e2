// A result file that is there whole or not at all: written beside its place, then renamed. A
// symbolic link stays one, and what it points to is replaced.
//
// Threads: stateless.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::cli {

// Before long work: ConfigError if a file could not be put at `path`. Writes nothing.
void check_output_file(const std::string& flag, const std::filesystem::path& path);
// IoError if it cannot; then no part of it is left.
void write_output_file(const std::filesystem::path& path, std::string_view text);

}  // namespace tessera::cli
