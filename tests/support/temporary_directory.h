// A directory of a test's own, removed with all that is in it.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace tessera::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() : TemporaryDirectory(std::filesystem::temp_directory_path()) {}
  explicit TemporaryDirectory(const std::filesystem::path& parent) {
    std::string name = (parent / "tessera-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("mkdtemp failed for " + name);
    }
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// On the disk that the tests were built on: temporary directories may be memory.
class DiskDirectory final : public TemporaryDirectory {
 public:
  DiskDirectory() : TemporaryDirectory(std::filesystem::current_path()) {}
};

// In memory where there is such a place, for what syncs many files: a disk takes longer for that
// than a test for all the rest.
class MemoryDirectory final : public TemporaryDirectory {
 public:
  MemoryDirectory()
      : TemporaryDirectory(::access("/dev/shm", W_OK) == 0
                               ? std::filesystem::path("/dev/shm")
                               : std::filesystem::temp_directory_path()) {}
};

}  // namespace tessera::testing
