// A Pending of work that another thread hands to a device later on: a copy that must not be started
// before the CPU has made what it copies.
//
// Threads: as PendingState. One thread fulfils it, once.
#pragma once

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "tessera/device/pending.h"

namespace tessera::device {

class HandedOver final : public PendingState {
 public:
  // What had to be done first is done. `rest`: what has to be waited for besides; it has been
  // started.
  void hand_over(Pending rest) {
    rest_ = std::move(rest);
    first_.succeed();
  }
  void fail(std::exception_ptr error) { first_.fail(std::move(error)); }
  // Neither hand_over() nor fail() has been called.
  bool is_open() { return !first_.done(); }

  bool awaits_hand_over() override { return is_open(); }
  std::optional<Pending> wait_handed_over() override {
    first_.wait();
    return rest_;
  }
  bool done() override { return first_.done() && rest_.done(); }
  void wait() override {
    first_.wait();
    rest_.wait();
  }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto start = std::chrono::steady_clock::now();
    if (!first_.wait_for(limit)) {
      return false;
    }
    const auto used = std::chrono::steady_clock::now() - start;
    return rest_.wait_for(used < limit ? limit - used : std::chrono::nanoseconds(0));
  }

 private:
  Completion first_;
  Pending rest_;  // set before first_ is fulfilled, read after it
};

}  // namespace tessera::device
