// From a trace and byte budgets to the moments of gathering and releasing. Pure: the same input
// gives the same plan on every rank and in the simulator.
//
// Moments of use i: its begin (gather what is missing, wait, then start prefetches) and its end
// (release). The plan lists per use
//
//   demand     parameters of use i that no earlier use has gathered or prefetched
//   prefetch   gathers to start once use i has begun, each one call, for the uses that follow
//   release    parameters of use i to release at its end
//
// and `ahead`, the prefetches to start before the first use: after the step before.
//
// Invariants:
//  (1) Full bytes held at any moment are at most live_limit_bytes, or those of the uses that are
//      running where these alone are more. A prefetch counts from its start.
//  (2) Uses are prefetched in the order of the trace, none is passed over. A prefetched parameter
//      is not released before the use it was prefetched for.
//  (3) Of what is used again within reuse_distance_bytes (bytes of the uses in between), as much
//      stays as the limit allows; what is used farthest ahead goes first (Belady), and it goes at
//      once, since it would not be there in time. The rest is released, unless the prefetch reaches
//      its next use while it is still held: it stays then, instead of being gathered again.
//      Prefetches take the room that is left: they never cost another gather. Where not all
//      parameters fit into the limit, the room that is left after them is used to keep what is used
//      again farther ahead than the reuse distance, the nearest first.
//  (4) At most max_inflight prefetches are started and not yet used; each has at most bucket_bytes,
//      unless one parameter alone is larger. A prefetch is used when the first of its uses begins.
//      A use is prefetched whole, unless it needs more than max_inflight calls: then the rest of it
//      is left to its demand.
//  (5) Parameters that persist are gathered for their first use and never released by the plan.
//  (6) Every gather has an offset in the arena, assigned by lifetime (arena_plan.h), or -1 where
//      there is no place.
//
// [Note: overlapping uses] A forward that runs inside another one is in the trace (open_until).
// Backward uses are taken as if each ended before the next begins, for the reason in
// access_trace.h; whoever carries the plan out deals with it: see the same note in coordinator.h.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/coordinator/access_trace.h"

namespace tessera::coordinator {

// max_inflight where gathers are copies from memory of the host: they need nothing but their place,
// so whatever fits may be under way.
inline constexpr int kHostCopiesInFlight = 256;

struct PlanBudgets {
  std::int64_t bucket_bytes = 0;  // 0: no prefetch
  int max_inflight = 4;
  // Uses smaller than this are gathered together with the next one, as far as the budgets allow.
  // Larger ones go alone: a use waits for the whole call that it is part of.
  std::int64_t merge_below_bytes = std::int64_t{1} << 20;
  std::int64_t live_limit_bytes = 0;
  std::int64_t reuse_distance_bytes = 0;
};

struct PlanParam {
  std::int64_t full_bytes = 0;
  bool persists = false;
};

struct PlanInput {
  std::span<const Use> uses;
  // By unit: ids of its parameters, ascending.
  std::span<const std::vector<int>> unit_params;
  // By parameter id.
  std::span<const PlanParam> params;
  PlanBudgets budgets;
  // By use, as in Trace; empty: every use ends before the next begins.
  std::span<const std::uint32_t> open_until = {};
  // Of the arena; 0: no offsets are assigned.
  std::int64_t arena_bytes = 0;
};

using GatherList = std::vector<int>;           // parameter ids of one call, in order
using OffsetList = std::vector<std::int64_t>;  // of a GatherList, one each; -1: anywhere

struct PlannedUse {
  GatherList demand;
  std::vector<GatherList> prefetch;
  std::vector<int> release;
  OffsetList demand_offsets;
  std::vector<OffsetList> prefetch_offsets;
};

struct PrefetchPlan {
  PlannedUse ahead;               // prefetch only
  std::vector<PlannedUse> uses;   // one per use of the trace
  std::int64_t peak_bytes = 0;    // of full parameters
  std::int64_t num_unplaced = 0;  // gathers for which the arena has no place
};

PrefetchPlan make_plan(const PlanInput& input);

// The same where the arena is all there is: if some gather has no place in it, less is held at
// once, down to one unit at a time, until all have one. Of an arena that is smaller than its
// largest unit, the plan that comes closest.
PrefetchPlan make_placed_plan(const PlanInput& input);

// What may persist of the limit: the largest unit must find room beside it, and another one, which
// is prefetched meanwhile.
std::int64_t room_to_persist(std::int64_t live_limit_bytes, std::int64_t largest_unit_bytes);

// Which parameters persist: at most param_bytes each, in the order of their ids, as long as the sum
// stays within min(model_bytes, room_bytes); one that does not fit is left out.
std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t room_bytes);

}  // namespace tessera::coordinator
