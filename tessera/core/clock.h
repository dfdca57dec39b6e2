// The only place where time is read. Whatever waits, times out or measures takes a Clock, so that
// tests decide what time it is and no test depends on how fast its machine is.
//
// Threads: now_ns() may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace tessera {

class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic nanoseconds from an arbitrary origin.
  virtual std::int64_t now_ns() const = 0;
};

class SteadyClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace tessera
