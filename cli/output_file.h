// What a command leaves: checks before long work whether it could be written, and a result file
// that is there whole or not at all: written beside its place, then renamed. A symbolic link stays
// one, and what it points to is replaced.
//
// Threads: stateless.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::cli {

// Before long work: ConfigError if a file could not be put at `path`. Writes nothing.
void check_output_file(const std::string& flag, const std::filesystem::path& path);
// The same for a directory: ConfigError if no file could be made in it, or in one that would be
// created for it.
void check_output_directory(const std::string& flag, const std::string& directory);
// IoError if it cannot; then no part of it is left.
void write_output_file(const std::filesystem::path& path, std::string_view text);

}  // namespace tessera::cli
