// Budgets where the user gave none: from what hosts and devices have, cut for the ranks on them.
//
// A rank gets of its host's memory what is available (of the machine and of its control group),
// divided by the ranks of the host, and of its device what is free, divided by the ranks that share
// it. Shared memory is its owner's and counts once: a plan has what its rank takes itself. Ranks
// plan alike, so all take the share of the one that has least.
//
// There is no budget, and nothing changes, where everything fits beside a reserve and what a step
// takes besides (activations, full gradients). Else the plan gets what is left; what fits nowhere
// is refused, with the arithmetic. A reserve alone refuses nothing: host memory without it is tried
// before.
//
// The reserve is for what no plan counts: workspaces of operators, kernels that are loaded when
// they are first used, the holes of torch's allocator, the program itself.
//
// Where nobody knows what activations take, a discrete device holds everything only if that is a
// small part of it. Else the first step runs with shards in host memory; activations are measured
// in it, and budgets are chosen again.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

// Of what is free. With a plan of 117 GiB for a GPU of 139, what torch and the engine had allocated
// at most was 2 % of the GPU above the plan; holes come on top.
inline constexpr std::int64_t kReservePerCent = 6;
// At least so many bytes, or an eighth where that is less.
inline constexpr std::int64_t kLeastReserveBytes = std::int64_t{512} << 20;
std::int64_t reserve_of(std::int64_t free_bytes);

// Of the buffer of one rank's saves, where no budget bounds it: its share of half of what the host
// has free without such buffers. `free_bytes`: while each of the host's ranks has `had_bytes` of
// one; so the same comes out at every save.
std::int64_t save_buffer_of(std::int64_t free_bytes, std::int64_t had_bytes, int num_local_ranks);

// Memory that ranks share, before any of them has taken its part.
struct SharedMemory {
  std::int64_t free_bytes = kUnlimited;
  int num_ranks = 1;

  std::int64_t of_rank() const {
    return free_bytes == kUnlimited ? kUnlimited : free_bytes / num_ranks;
  }
};

struct RankMemory {
  SharedMemory device;  // of a discrete device
  SharedMemory host;
};
// What every rank has at least. REQUIRES: not empty.
RankMemory least_memory(std::span<const RankMemory> ranks);

// What a step takes besides the plan.
struct StepMemory {
  // Of a micro-batch, at most; none: not known.
  std::optional<std::int64_t> activation_bytes;
  // All of a discrete device with such a plan: what is planned, activations and full gradients at
  // their worst moment. Null: their sum.
  std::function<std::int64_t(const MemoryPlan&)> device_peak_bytes;

  std::int64_t peak_bytes(const MemoryPlan& plan) const;
};

struct DefaultBudgets {
  MemoryPlanOptions options;       // with budgets
  MemoryPlan plan;                 // what follows from them
  bool is_for_first_step = false;  // chosen again when activations are known
  // Why, per rank: what everything would take, and what there is.
  std::int64_t wanted_device_bytes = 0;  // with activations and gradients
  std::int64_t wanted_host_bytes = 0;
  RankMemory memory;

  // One line for people: what does not fit, what was chosen, and which options change it.
  std::string text() const;
};

// Null: everything fits, or the user gave numbers. Throws ConfigError, with the arithmetic, if
// nothing would, also of a plan within numbers that were given. They stay; "unlimited" turns the
// check off.
std::optional<DefaultBudgets> default_budgets(const ModelShapes& model,
                                              const MemoryPlanOptions& options,
                                              std::int64_t num_micro_batches,
                                              const StepMemory& step, const RankMemory& memory);

}  // namespace tessera::planner
