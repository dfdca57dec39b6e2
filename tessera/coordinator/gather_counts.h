// What gathering has cost: per unit and phase, and in sum.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <functional>

namespace tessera::coordinator {

// Bytes are those of full parameters, padding included.
struct GatherCounts {
  std::uint64_t hits = 0;         // parameters that a use needed and that a prefetch had started
  std::uint64_t misses = 0;       // parameters that had to be gathered on demand
  std::uint64_t missed_uses = 0;  // uses with at least one of them
  std::uint64_t drops = 0;        // parameters that were prefetched in vain
  std::uint64_t demand_calls = 0;
  std::uint64_t prefetch_calls = 0;
  std::uint64_t demand_bytes = 0;
  std::uint64_t prefetch_bytes = 0;
  // Host time: to start calls, and that uses waited for them.
  double demand_submit_s = 0;
  double prefetch_submit_s = 0;
  double demand_wait_s = 0;
  double prefetch_wait_s = 0;

  // Each number with its fellow.
  template <typename Combine>
  GatherCounts& apply(const GatherCounts& other, const Combine& combine) {
    hits = combine(hits, other.hits);
    misses = combine(misses, other.misses);
    missed_uses = combine(missed_uses, other.missed_uses);
    drops = combine(drops, other.drops);
    demand_calls = combine(demand_calls, other.demand_calls);
    prefetch_calls = combine(prefetch_calls, other.prefetch_calls);
    demand_bytes = combine(demand_bytes, other.demand_bytes);
    prefetch_bytes = combine(prefetch_bytes, other.prefetch_bytes);
    demand_submit_s = combine(demand_submit_s, other.demand_submit_s);
    prefetch_submit_s = combine(prefetch_submit_s, other.prefetch_submit_s);
    demand_wait_s = combine(demand_wait_s, other.demand_wait_s);
    prefetch_wait_s = combine(prefetch_wait_s, other.prefetch_wait_s);
    return *this;
  }
  GatherCounts& operator+=(const GatherCounts& other) { return apply(other, std::plus<>()); }
  GatherCounts& operator-=(const GatherCounts& other) { return apply(other, std::minus<>()); }
};

inline GatherCounts operator-(GatherCounts left, const GatherCounts& right) {
  return left -= right;
}

}  // namespace tessera::coordinator
