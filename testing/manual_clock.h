// A clock that the test moves.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/core/clock.h"

namespace tessera {

// A clock that stands still until it is told to move.
class ManualClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return now_ns_.load(std::memory_order_acquire); }
  void advance_ns(std::int64_t delta_ns) { now_ns_.fetch_add(delta_ns, std::memory_order_acq_rel); }

 private:
  std::atomic<std::int64_t> now_ns_{0};
};

}  // namespace tessera
