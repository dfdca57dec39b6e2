#include "tessera/tier/thread_engine.h"

#include <unistd.h>

#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

ssize_t transfer(const IoRequest& request) {
  const auto offset = static_cast<off_t>(request.rest_offset());
  const ssize_t result =
      request.direction == IoDirection::kRead
          ? ::pread(request.fd, request.rest_memory(), request.rest_bytes(), offset)
          : ::pwrite(request.fd, request.rest_memory(), request.rest_bytes(), offset);
  return result < 0 ? -errno : result;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const IoOptions& options)
      : queue_(options.block_bytes, nullptr, options.spans) {
    try {
      for (int i = 0; i < options.num_threads; ++i) {
        threads_.push_back(start_io_thread([this] { work(); }));
      }
    } catch (...) {
      end();
      throw;
    }
  }
  ~ThreadEngine() override { end(); }

  std::string_view name() const override { return "threads"; }
  Pending start_read(const IoFile& file, std::uint64_t offset, std::byte* to, std::size_t bytes,
                     std::string what) override {
    return queue_.push_read(file, offset, to, bytes, std::move(what));
  }
  Pending start_write(const IoFile& file, std::uint64_t offset, const std::byte* from,
                      std::size_t bytes, std::string what) override {
    return queue_.push_write(file, offset, from, bytes, std::move(what));
  }
  IoCounts counts() const override { return queue_.counts(); }

 private:
  void work() {
    while (std::optional<IoRequest> request = queue_.take()) {
      while (!queue_.advance(*request, transfer(*request))) {
      }
    }
  }

  void end() {
    queue_.close();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  RangeQueue queue_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(const IoOptions& options) {
  return std::make_unique<ThreadEngine>(options);
}

}  // namespace tessera::tier
