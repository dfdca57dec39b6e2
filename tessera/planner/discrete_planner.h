// Internal to planner: a plan for a discrete device and its host (memory_planner.h).
//
// Threads: pure functions.
#pragma once

#include <cstdint>

#include "tessera/planner/memory_cost.h"

namespace tessera::planner {

// Throws ConfigError, with the arithmetic, if it does not fit.
MemoryPlan plan_discrete(const CutModel& cut, std::int64_t num_micro_batches);

}  // namespace tessera::planner
