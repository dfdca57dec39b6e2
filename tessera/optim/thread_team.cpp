#include "tessera/optim/thread_team.h"

#include <pthread.h>
#include <sched.h>

#include <cstddef>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::optim {

ThreadTeam::ThreadTeam(int num_threads, const std::vector<int>& cores) {
  TESSERA_CHECK(num_threads >= 1, ConfigError, "update with ", num_threads,
                " threads: at least 1 is needed, the calling one");
  TESSERA_CHECK(cores.empty() || cores.size() == static_cast<std::size_t>(num_threads), ConfigError,
                "update with ", num_threads, " threads on ", cores.size(),
                " cores: give one core per thread, or none");
  helpers_.reserve(static_cast<std::size_t>(num_threads - 1));
  try {
    for (int i = 1; i < num_threads; ++i) {
      helpers_.emplace_back([this] { help(); });
    }
    if (!cores.empty()) {
      bind_helpers(cores);
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::bind_helpers(const std::vector<int>& cores) {
  for (std::size_t i = 0; i < helpers_.size(); ++i) {
    const int core = cores[i + 1];
    TESSERA_CHECK(core >= 0 && core < CPU_SETSIZE, ConfigError, "update thread ", i + 1,
                  " on core ", core, ": cores are numbered from 0 to ", CPU_SETSIZE - 1);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    const int code = pthread_setaffinity_np(helpers_[i].native_handle(), sizeof(set), &set);
    TESSERA_CHECK(code == 0, ConfigError, "update thread ", i + 1, " on core ", core, ": ",
                  std::generic_category().message(code),
                  "; choose among the cores that this process may use (taskset -p)");
  }
}

void ThreadTeam::stop() noexcept {
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
