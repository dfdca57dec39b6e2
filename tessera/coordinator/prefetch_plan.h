// From a trace and byte budgets to the moments of gathering and releasing. Pure: the same input
// gives the same plan on every rank and in the simulator.
//
// Moments of use i: its begin (gather what is missing, wait, then start prefetches) and its end
// (release). The plan lists per use
//
//   demand     parameters of use i that no earlier use has gathered or prefetched
//   prefetch   gathers to start once use i has begun, each one call, for the uses that follow
//   release    parameters to release at the end of use i
//
// Invariants:
//  (1) Full bytes held at any moment, without those of the use that is running, are at most
//      live_limit_bytes. A prefetch counts from its start.
//  (2) Uses are prefetched in the order of the trace, none is passed over. A prefetched parameter
//      is not released before the use it was prefetched for.
//  (3) Of what may be released, what is used farthest ahead goes first (Belady), and it goes only
//      if it is not used again within reuse_distance_bytes, or if its room is needed.
//  (4) At most max_inflight prefetches are started and not yet used; each holds whole uses and at
//      most bucket_bytes, unless one use alone is larger.
//  (5) Parameters that persist are gathered at their first use and never released by the plan.
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

// Which parameters persist: at most param_bytes each, in the order of their ids while the sum stays
// within min(model_bytes, live_limit_bytes).
std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t live_limit_bytes);

}  // namespace tessera::coordinator
