// The Pending of one parameter's update (Param::updated()): done when the update has run and, where
// the new values are to be read from the store, when they have been written.
//
// Threads: as PendingState. One thread fulfils it, once.
#pragma once

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "tessera/device/pending.h"

namespace tessera::optim {

class ParamUpdate final : public device::PendingState {
 public:
  // The update has run. `written`: what has to be waited for besides.
  void finish(device::Pending written) {
    written_ = std::move(written);
    updated_.succeed();
  }
  void fail(std::exception_ptr error) { updated_.fail(std::move(error)); }
  // Neither finish() nor fail() has been called.
  bool is_open() { return !updated_.done(); }

  // By then whatever is still to be waited for has been started.
  std::optional<device::Pending> wait_handed_over() override {
    updated_.wait();
    return written_;
  }
  bool done() override { return updated_.done() && written_.done(); }
  void wait() override {
    updated_.wait();
    written_.wait();
  }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto start = std::chrono::steady_clock::now();
    if (!updated_.wait_for(limit)) {
      return false;
    }
    const auto used = std::chrono::steady_clock::now() - start;
    return written_.wait_for(used < limit ? limit - used : std::chrono::nanoseconds(0));
  }

 private:
  device::Completion updated_;
  device::Pending written_;  // set before updated_ is fulfilled, read after it
};

}  // namespace tessera::optim
