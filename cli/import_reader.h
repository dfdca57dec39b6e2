// The Python that runs cli/import/deepspeed.py, and what it sends.
//
// It has its own process, since it looks at pickles. What it says on stderr when it fails becomes
// our message; what it sends before is for read() to get and for others to check.
//
// Threads: one.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/memory_file.h"

namespace tessera::cli {

class ImportReader {
 public:
  // `arguments` are the script's. ConfigError if there is no such program.
  ImportReader(const std::string& python, const std::vector<std::string>& arguments);
  // Ends the program if it still runs.
  ~ImportReader();
  ImportReader(const ImportReader&) = delete;
  ImportReader& operator=(const ImportReader&) = delete;

  // Blocks until there are that many bytes. Where they end before: ConfigError with the reason that
  // the program gave, or IoError with how it ended.
  void read(std::span<std::byte> out);
  // All has been read. Throws the same, or CorruptError if there is more.
  void finish();

 private:
  // Until the next bytes are there; zero: there are none.
  std::size_t read_some(std::span<std::byte> out);
  // Its status, when it has ended.
  int wait() noexcept;
  [[noreturn]] void throw_failure();

  const std::string python_;
  MemoryFile errors_;
  pid_t pid_ = -1;
  int fd_ = -1;                  // its stdout
  int status_ = 0;               // once it has ended
  std::uint64_t num_bytes_ = 0;  // so far
};

}  // namespace tessera::cli
