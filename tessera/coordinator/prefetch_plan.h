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
// Invariants:
//  (1) Full bytes held at any moment, without those of the use that is running, are at most
//      live_limit_bytes. A prefetch counts from its start. Between two uses the one to come is the
//      one that is left out, so that what it shares with the last one may stay at any limit.
//  (2) Uses are prefetched in the order of the trace, none is passed over. A prefetched parameter
//      is not released before the use it was prefetched for.
//  (3) Of what is used again within reuse_distance_bytes (bytes of the uses in between), as much
//      stays as the limit allows; what is used farthest ahead goes first (Belady), and it goes at
//      once, since it would not be there in time. The rest is released, unless the prefetch reaches
//      its next use while it is still held: it stays then, instead of being gathered again.
//      Prefetches take the room that is left: they never cost another gather.
//  (4) At most max_inflight prefetches are started and not yet used; each holds whole uses and at
//      most bucket_bytes, unless one use alone is larger. A prefetch is used when the first of its
//      uses begins.
//  (5) Parameters that persist are gathered for their first use and never released by the plan.
//
// [Note: overlapping uses] The plan takes uses as if each ended before the next begins. In a real
// program a unit may run inside another one, and in backward a use often ends only after the next
// has begun. Ends are not in the trace, for the reason in access_trace.h, so whoever carries the
// plan out deals with them: see the same note in coordinator.h.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/coordinator/access_trace.h"

namespace tessera::coordinator {

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
};

using GatherList = std::vector<int>;  // parameter ids of one call, in order

struct PlannedUse {
  GatherList demand;
  std::vector<GatherList> prefetch;
  std::vector<int> release;
};

struct PrefetchPlan {
  std::vector<PlannedUse> uses;  // one per use of the trace
  std::int64_t peak_bytes = 0;   // of full parameters, the running use included
};

PrefetchPlan make_plan(const PlanInput& input);

// Which parameters persist: at most param_bytes each, in the order of their ids, as long as the sum
// stays within min(model_bytes, live_limit_bytes); one that does not fit is left out.
std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t live_limit_bytes);

}  // namespace tessera::coordinator
