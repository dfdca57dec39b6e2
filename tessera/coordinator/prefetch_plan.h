// Makes a plan from a trace and byte budgets: when to gather and when to release. Pure: the same
// input gives the same plan on every rank and in the simulator.
//
// The plan acts at the begin of a use (gather what is missing, wait, then start prefetches) and at
// its end (release). It lists per use i
//
//   demand     parameters of use i that no earlier use has gathered or prefetched
//   prefetch   gathers to start once use i has begun, each one call, for later uses
//   release    parameters of use i to release at its end
//
// and `ahead`, the prefetches to start before the first use, which is after the previous step.
//
// Invariants:
//  (1) Full bytes held at any moment are at most live_limit_bytes, or the bytes of the running uses
//      if these alone are more. A prefetch counts from its start.
//  (2) Uses are prefetched in the order of the trace, and none is skipped. A prefetched parameter
//      is not released before the use for which it was prefetched.
//  (3) Parameters that are used again within reuse_distance_bytes (bytes of the uses in between)
//      are kept as far as the limit allows; those with the farthest next use are released first
//      (Belady), and at once, since they would have to be released before that use anyway. Other
//      parameters are released, unless prefetch reaches their next use while they are still held.
//      Prefetches take only the space that is left, so they never cause another gather; where not
//      all parameters fit into the limit, the space left after them keeps parameters whose next use
//      is beyond the reuse distance, the nearest first.
//  (4) At most max_inflight prefetches are started and not yet used; each has at most bucket_bytes,
//      unless one parameter alone is larger. A prefetch is used when the first of its uses begins.
//      A use is prefetched whole, unless it needs more than max_inflight calls: then the rest is
//      gathered on demand.
//  (5) Parameters that persist are gathered for their first use and never released by the plan.
//  (6) Every gather has an offset in the arena, assigned by lifetime (arena_plan.h), or -1 if none
//      is free.
//
// [Note: overlapping uses] A forward that runs inside another one is in the trace (open_until).
// Backward uses are planned as if each ended before the next begins, for the reason in
// access_trace.h; the coordinator handles overlaps, see the same note in coordinator.h.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/coordinator/access_trace.h"

namespace tessera::coordinator {

// max_inflight where gathers are copies from host memory: they need only their place in the arena,
// so all that fit may be in flight.
inline constexpr int kHostCopiesInFlight = 256;

struct PlanBudgets {
  std::int64_t bucket_bytes = 0;  // 0: no prefetch
  int max_inflight = 4;
  // Uses smaller than this are gathered together with the next use, as far as the budgets allow. A
  // larger use has a call to itself, because a use waits for the whole call that it is part of.
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
  // By use, as in Trace. Empty: every use ends before the next begins.
  std::span<const std::uint32_t> open_until = {};
  // Size of the arena; 0: no offsets are assigned.
  std::int64_t arena_bytes = 0;
};

using GatherList = std::vector<int>;           // parameter ids of one call, in order
using OffsetList = std::vector<std::int64_t>;  // one per entry of a GatherList; -1: anywhere

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
  std::int64_t num_unplaced = 0;  // gathers without an offset in the arena
};

PrefetchPlan make_plan(const PlanInput& input);

// The same for an arena that is the only memory: if some gather has no offset, it holds less at
// once, down to one unit at a time, until all have one. If the arena is smaller than the largest
// unit, returns the plan with the fewest gathers without an offset.
PrefetchPlan make_placed_plan(const PlanInput& input);

// How much of the limit may persist: the rest must hold the largest unit, and another one that is
// prefetched meanwhile.
std::int64_t room_to_persist(std::int64_t live_limit_bytes, std::int64_t largest_unit_bytes);

// Chooses the parameters that persist: of at most param_bytes each, in the order of ids, while the
// sum stays within min(model_bytes, room_bytes); one that does not fit is skipped.
std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t room_bytes);

}  // namespace tessera::coordinator
