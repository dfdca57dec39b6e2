// Whether this machine has what a plan needs besides memory, which planner/memory_budgets.h counts.
//
// Threads: pure functions, but for the one that asks the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/planner/memory_plan.h"

namespace tessera::engine {

// What this machine can give now, for all ranks on it.
struct MachineLimits {
  std::int64_t locked_bytes = planner::kUnlimited;  // per process
  struct Directory {
    std::string path;
    std::int64_t free_bytes = 0;
  };
  std::vector<Directory> directories;  // for NVMe; bytes are striped over them

  static MachineLimits of_this_machine(const std::vector<std::string>& directories);
};

// Throws ConfigError, with the arithmetic, if `num_local_ranks` ranks with this plan are more than
// the machine can give.
void check_fits(const planner::MemoryPlan& plan, const MachineLimits& limits, int num_local_ranks);

}  // namespace tessera::engine
