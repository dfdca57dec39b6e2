// Work that counts how often the thread that made it would have been blocked by a wait for it. The
// first time ends the work: a test that fails must not hang.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "tessera/device/pending.h"

namespace tessera::comm {

class CountedPending final : public device::PendingState {
 public:
  // By the thread that made it.
  void succeed() {
    if (!work_.done()) {
      work_.succeed();
    }
  }
  int num_waits() const { return num_waits_; }

  bool done() override { return work_.done(); }
  void wait() override {
    count();
    work_.wait();
  }
  bool wait_for(std::chrono::nanoseconds limit) override {
    count();
    return work_.wait_for(limit);
  }

 private:
  void count() {
    if (std::this_thread::get_id() == maker_ && !work_.done()) {
      ++num_waits_;
      succeed();
    }
  }

  const std::thread::id maker_ = std::this_thread::get_id();
  device::Completion work_;
  std::atomic<int> num_waits_{0};
};

}  // namespace tessera::comm
