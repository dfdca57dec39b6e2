// Budgets for a GPU that does not hold everything, where nobody gave any.
//
// Asked before anything is allocated: if what would live on the device without a budget, the
// activations of a micro-batch and a reserve are more than the GPU has free, the plan gets what is
// left for it, and host memory what is free there. Otherwise there is no budget, and nothing
// changes.
//
// The reserve is for what no plan counts: workspaces of operators, kernels that are loaded when
// they are first used, and the holes of torch's allocator. In host memory it is for the program
// itself.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/planner/memory_plan.h"

namespace tessera::cli {

// Of what is free, and at least so many bytes. With a plan of 117 GiB for a GPU of 139, what torch
// and the engine had allocated at most was 2 % of the GPU above the plan; holes come on top.
inline constexpr std::int64_t kReservePerCent = 6;
inline constexpr std::int64_t kLeastReserveBytes = std::int64_t{512} << 20;

struct FreeMemory {  // for one rank
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;
};

struct DefaultBudgets {
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;  // as given, where a budget of host memory was given
  bool is_host_given = false;
  // Of the update, as in MemoryPlanOptions: 1 where gradients of the GPU's share would not fit.
  double cpu_share = -1;
  // Why, all of the device: `planned_bytes` of shards and what moves them.
  std::int64_t free_bytes = 0;
  std::int64_t planned_bytes = 0;
  std::int64_t activation_bytes = 0;  // with full gradients that autograd holds, or that leave
  std::int64_t reserve_bytes = 0;

  // One line for people: what does not fit, what was chosen, and which flags change it.
  std::string text() const;
};

// Null: it fits. Throws ConfigError, with the arithmetic, if nothing would: activations alone are
// too many, or there is no plan within what is free. REQUIRES: options.is_discrete and no budget of
// the device.
std::optional<DefaultBudgets> default_budgets(const planner::ModelShapes& model,
                                              const planner::MemoryPlanOptions& options,
                                              std::int64_t num_micro_batches,
                                              std::int64_t activation_bytes,
                                              const FreeMemory& free);

}  // namespace tessera::cli
