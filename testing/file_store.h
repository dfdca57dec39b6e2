// The key-value store of ranks that are processes of one test: a file per key in a directory that
// the test owns. It has no server, no thread and no descriptor between calls, so it survives fork()
// and the death of any rank.
//
// Threads: every method may be called from any thread, and from any process.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tessera/comm/store.h"
#include "tessera/core/error.h"

namespace tessera::comm {

class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path directory) : directory_(std::move(directory)) {}

  // Written beside and renamed: a reader sees all of a value or none of it.
  void set(const std::string& key, const std::string& value) override {
    static std::atomic<std::uint64_t> num_writes{0};
    const std::filesystem::path beside =
        directory_ / detail::concat("new.", getpid(), ".", num_writes++);
    std::ofstream file(beside, std::ios::binary);
    file << value;
    file.close();
    TESSERA_CHECK(file.good(), CommError, "key '", key, "' could not be written to ",
                  beside.string());
    std::filesystem::rename(beside, path_of(key));
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      if (auto value = try_get(key)) {
        return *value;
      }
      TESSERA_CHECK(std::chrono::steady_clock::now() < deadline, CommError, "key '", key,
                    "' was not set within ", timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::optional<std::string> try_get(const std::string& key) override {
    std::ifstream file(path_of(key), std::ios::binary);
    if (!file) {
      return std::nullopt;
    }
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    const Lock lock(directory_ / "lock");
    const std::int64_t sum = std::stoll(try_get(key).value_or("0")) + delta;
    set(key, std::to_string(sum));
    return sum;
  }
  std::string address() const override { return directory_.string(); }
  std::uint16_t port() const override { return 0; }

 private:
  // Opened anew each time: threads of one process keep each other out, too. A process that dies
  // with it gives it back.
  class Lock {
   public:
    explicit Lock(const std::filesystem::path& path)
        : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
      int result = -1;
      do {
        result = fd_ < 0 ? -1 : flock(fd_, LOCK_EX);
      } while (fd_ >= 0 && result != 0 && errno == EINTR);
      if (result != 0) {
        const int error = errno;
        close(fd_);
        throw CommError(detail::concat(path.string(), ": ", std::strerror(error)));
      }
    }
    ~Lock() { close(fd_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    int fd_ = -1;
  };

  std::filesystem::path path_of(const std::string& key) const {
    std::string name = "key.";
    for (const char letter : key) {
      name += letter == '/' ? std::string("%2f") : std::string(1, letter);
    }
    return directory_ / name;
  }

  const std::filesystem::path directory_;
};

}  // namespace tessera::comm
