// A file without a name, in memory: what a program that is started reads, or prints. Unlike a pipe
// it cannot fill up.
//
// Threads: one at a time; the program's own writes are behind nobody's back once it has ended.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cli {

class MemoryFile {
 public:
  // IoError if there is no memory for it.
  explicit MemoryFile(std::string_view content = {});
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // At its beginning.
  int fd() const { return fd_; }
  // The first 16 MiB.
  std::string text() const;

 private:
  const int fd_;
};

}  // namespace tessera::cli
