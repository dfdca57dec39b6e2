// Costs of gathering: per unit and phase, and in total.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::coordinator {

// Bytes are those of full parameters, padding included.
struct GatherCounts {
  std::uint64_t hits = 0;         // parameters that a use needed and that a prefetch had started
  std::uint64_t misses = 0;       // parameters that had to be gathered on demand
  std::uint64_t missed_uses = 0;  // uses with at least one of them
  std::uint64_t drops = 0;        // prefetched parameters that were dropped unused
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

// Error of quantised gathers in the last step, over this rank's shards: root of the sum of squared
// errors, divided by the root of the sum of squared values.
struct QuantError {
  double relative = 0;
  std::string param;  // whose own is the largest; empty: nothing was quantised
  double worst = 0;   // its own
};

// Since the last take_stats(). In a group of one only what is not in the device's memory is
// gathered: if all is, all but num_uses and full_bytes_peak stay 0.
struct CoordinatorStats {
  std::uint64_t num_uses = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  std::uint64_t prefetch_drops = 0;
  std::uint64_t num_gathers = 0;  // calls
  std::uint64_t gathered_bytes = 0;
  std::uint64_t secondary_bytes = 0;       // of them, from secondary shards, which have
  std::uint64_t secondary_wire_bytes = 0;  // so many bytes, of all ranks of their group together
  std::uint64_t encoded_bytes = 0;  // of them, from shards that are encoded or stored as blocks,
  std::uint64_t wire_bytes = 0;     // which have so many bytes, of all ranks together
  double exposed_wait_s = 0;        // host time that uses waited for gathers
  // Full parameters at once: gathered, or in use in place (in a group of one).
  std::int64_t full_bytes_peak = 0;
  std::uint64_t brought_bytes = 0;  // H2D, from shards and secondary shards in host memory
  std::uint64_t kept_bytes = 0;     // written to secondary shards in host memory: D2H
  std::uint64_t arena_overflows = 0;
  std::uint64_t arena_misplaced = 0;  // gathers that did not get their planned offset
  std::uint64_t num_consensus_rounds = 0;
  GatherCounts forward;
  GatherCounts backward;
  GatherCounts inference;
  QuantError quant_error;
};

}  // namespace tessera::coordinator
