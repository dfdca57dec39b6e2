// Where a plan stands in its middle, and what persists outside of all plans.

#include <algorithm>
#include <utility>

#include "tessera/coordinator/prefetch_plan.h"

namespace tessera::coordinator {

PrefetchPlan make_placed_plan(const PlanInput& input) {
  PrefetchPlan plan = make_plan(input);
  std::int64_t largest_unit = 0;
  for (const std::vector<int>& ids : input.unit_params) {
    std::int64_t bytes = 0;
    for (const int id : ids) {
      bytes += input.params[static_cast<std::size_t>(id)].full_bytes;
    }
    largest_unit = std::max(largest_unit, bytes);
  }
  const std::int64_t limit = std::min(input.budgets.live_limit_bytes, input.arena_bytes);
  constexpr int kTries = 8;
  for (int left = kTries - 1; left >= 0 && plan.num_unplaced > 0 && limit > largest_unit; --left) {
    PlanInput less = input;
    less.budgets.live_limit_bytes = largest_unit + (limit - largest_unit) / kTries * left;
    PrefetchPlan candidate = make_plan(less);
    if (candidate.num_unplaced < plan.num_unplaced) {
      plan = std::move(candidate);
    }
  }
  return plan;
}

PlanState state_after(const PlanInput& input, const PrefetchPlan& plan, std::size_t num_begun) {
  PlanState state;
  state.held.assign(input.params.size(), false);
  std::vector<bool> is_unused(input.params.size());
  std::vector<const GatherList*> calls;
  const auto start = [&](const PlannedUse& planned) {
    for (const GatherList& list : planned.prefetch) {
      calls.push_back(&list);
      for (const int id : list) {
        state.held[static_cast<std::size_t>(id)] = true;
        is_unused[static_cast<std::size_t>(id)] = true;
      }
    }
  };
  start(plan.ahead);
  for (std::size_t use = 0; use < num_begun; ++use) {
    const PlannedUse& planned = plan.uses[use];
    for (const int id : input.unit_params[static_cast<std::size_t>(input.uses[use].unit)]) {
      state.held[static_cast<std::size_t>(id)] = true;
      is_unused[static_cast<std::size_t>(id)] = false;
    }
    for (const int id : planned.release) {
      state.held[static_cast<std::size_t>(id)] = false;
    }
    start(planned);
  }
  // A parameter may be prefetched several times; only the last call is outstanding.
  for (std::size_t i = calls.size(); i-- > 0;) {
    GatherList left;
    for (const int id : *calls[i]) {
      if (is_unused[static_cast<std::size_t>(id)]) {
        left.push_back(id);
        is_unused[static_cast<std::size_t>(id)] = false;
      }
    }
    if (!left.empty()) {
      state.outstanding.insert(state.outstanding.begin(), std::move(left));
    }
  }
  return state;
}

std::int64_t room_to_persist(std::int64_t live_limit_bytes, std::int64_t largest_unit_bytes) {
  return std::max<std::int64_t>(0, live_limit_bytes - 2 * largest_unit_bytes);
}

std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t room_bytes) {
  std::vector<bool> persists(full_bytes.size());
  room_bytes = std::min(model_bytes, room_bytes);
  for (std::size_t i = 0; i < full_bytes.size(); ++i) {
    if (full_bytes[i] <= param_bytes && full_bytes[i] <= room_bytes) {
      persists[i] = true;
      room_bytes -= full_bytes[i];
    }
  }
  return persists;
}

}  // namespace tessera::coordinator
