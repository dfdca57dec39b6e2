#include "tessera/optim/thread_team.h"

#include "tessera/core/error.h"

namespace tessera::optim {

ThreadTeam::ThreadTeam(int num_threads) {
  TESSERA_CHECK(num_threads >= 1, ConfigError, "update with ", num_threads,
                " threads: at least 1 is needed, the calling one");
  helpers_.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int i = 1; i < num_threads; ++i) {
    helpers_.emplace_back([this] { help(); });
  }
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& helper : helpers_) {
    helper.join();
  }
}

void ThreadTeam::run(std::int64_t num_chunks, const std::function<void(std::int64_t)>& body) {
  if (helpers_.empty() || num_chunks <= 1) {
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      body(chunk);
    }
    return;
  }
  const std::lock_guard one_loop(run_mutex_);
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    num_chunks_ = num_chunks;
    next_chunk_.store(0, std::memory_order_relaxed);
    num_working_ = static_cast<int>(helpers_.size());
    ++loop_number_;
  }
  changed_.notify_all();
  take_chunks();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_working_ == 0; });
}

void ThreadTeam::help() {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_stopping_ || loop_number_ != seen; });
    if (is_stopping_) {
      return;
    }
    seen = loop_number_;
    lock.unlock();
    take_chunks();
    lock.lock();
    if (--num_working_ == 0) {
      changed_.notify_all();
    }
  }
}

void ThreadTeam::take_chunks() {
  for (std::int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
       chunk < num_chunks_; chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed)) {
    (*body_)(chunk);
  }
}

}  // namespace tessera::optim
