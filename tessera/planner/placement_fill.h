// Internal to planner: which shards stay in memory under a budget, and how large buffers become.
// placement.h says by which rules.
//
// Threads: pure functions.
#pragma once

#include "tessera/planner/placement_cost.h"

namespace tessera::planner {

// Everything but what complete() fills in. Throws ConfigError, with the arithmetic, if it does not
// fit into memory.
Placement fill(const CutModel& cut);

}  // namespace tessera::planner
