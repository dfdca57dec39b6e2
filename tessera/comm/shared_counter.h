// A number in memory that processes share, which only grows (modulo 2^32) and can be waited for.
//
// One process advances it, any may wait. A wait spins for a moment, since a peer that computes the
// same is about as far, and sleeps then: more ranks than cores must not take each other's time.
//
// Invariant: memory written before advance() is seen by whoever has waited for that value.
//
// Threads: advance() from one at a time; wait() from any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm {

class alignas(64) SharedCounter {
 public:
  // How often a sleeping wait looks at what cannot wake it: an abort, a peer that has ended.
  static constexpr std::chrono::milliseconds kLookInterval{50};

  bool has_reached(std::uint32_t value) const {
    return static_cast<std::int32_t>(value_.load(std::memory_order_seq_cst) - value) >= 0;
  }

  void advance(std::uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst) != 0) {
      wake();
    }
  }

  // Calls `look` before it sleeps and about every kLookInterval; what that throws ends the wait.
  template <typename Look>
  void wait(std::uint32_t value, const Look& look) {
    for (int i = 0; i < kSpins; ++i) {
      if (has_reached(value)) {
        return;
      }
      pause();
    }
    const Sleeper sleeper(num_sleeping_);
    while (!has_reached(value)) {
      const std::uint32_t seen = value_.load(std::memory_order_seq_cst);
      look();
      if (static_cast<std::int32_t>(seen - value) < 0) {
        sleep(seen);
      }
    }
  }

 private:
  static constexpr int kSpins = 200;  // some microseconds

  struct Sleeper {
    explicit Sleeper(std::atomic<std::uint32_t>& counted) : count(counted) { count.fetch_add(1); }
    ~Sleeper() { count.fetch_sub(1); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    std::atomic<std::uint32_t>& count;
  };

  static void pause();
  // Until it is woken, the value is not `seen` any more, or kLookInterval has passed.
  void sleep(std::uint32_t seen);
  void wake();

  std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> num_sleeping_{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share it");

}  // namespace tessera::comm
