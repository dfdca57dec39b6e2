// Internal to engine: jobs in order, of which one thread prepares each before others do it.
//
// Threads: prepared() from one, the rest from any.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace tessera::engine {

class JobQueue {
 public:
  explicit JobQueue(std::size_t num_jobs) : num_jobs_(num_jobs) {}

  // The next one may be done.
  void prepared() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_prepared_;
    changed_.notify_one();
  }
  // The next one, once it is prepared; nothing: there are no more, or one has failed.
  std::optional<std::size_t> take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return next_ < num_prepared_ || is_over(); });
    if (is_over()) {
      return std::nullopt;
    }
    const std::size_t job = next_++;
    if (is_over()) {
      changed_.notify_all();  // those who wait for one more
    }
    return job;
  }
  bool has_failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !failures_.empty();
  }
  void fail(std::size_t job, std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_.emplace(job, std::move(error));
    changed_.notify_all();
  }
  // The failure of the first job that has one. Once nobody is at work.
  void check() {
    if (!failures_.empty()) {
      std::rethrow_exception(failures_.begin()->second);
    }
  }

 private:
  bool is_over() const { return next_ == num_jobs_ || !failures_.empty(); }

  const std::size_t num_jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::size_t num_prepared_ = 0;
  std::size_t next_ = 0;
  std::map<std::size_t, std::exception_ptr> failures_;  // by job
};

}  // namespace tessera::engine
