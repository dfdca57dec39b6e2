// Whether this machine has what a plan needs.
//
// Threads: pure functions, but for the one that asks the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/planner/memory_plan.h"

namespace tessera::cli {

// What this machine can give now, for all ranks on it.
struct MachineLimits {
  std::int64_t memory_available_bytes =
      planner::kUnlimited;                          // of the machine and its control group
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

}  // namespace tessera::cli
