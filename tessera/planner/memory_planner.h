// Makes a plan of memory from byte budgets. Pure: allocates nothing, and the same input gives the
// same plan on every machine with the same page size.
//
// Shards with a given tier (place.*) are placed there. All others are placed in device memory as
// far as its budget allows, then in host memory, then on NVMe, in the order of use.
//
// A discrete device and its host have a budget each. Small parameters (MemoryPlanOptions) are
// on the device in every respect. Of the others:
//   parameters  on the device as far as its budget allows, then in host memory, then on NVMe;
//   states      on the device once all parameters are there, then in host memory, then on NVMe;
//   gradients   on the device where the device updates, else in host memory; on NVMe if the host
//               does not hold them although all else that may has left it;
//   secondary shards  on the device before parameters and states without a given tier; the rest in
//               host memory.
// Memory for a few slots of streamed sub-groups and for a few units in the arena is reserved before
// shards are placed on the device. What is left goes to more slots, then to the arena until it
// holds everything that is gathered. Under a host budget states move to NVMe first, then
// parameters, and gradients last: in fp32 each is written and read in every micro-batch, to save as
// little as 2 B. A larger budget never puts more bytes on NVMe, with one exception: a parameter
// that moves to the device can displace the states of a few others. update_split.h chooses the
// updater.
//
// On a CPU device and host are one memory, bounded by the smaller of both budgets, and the CPU
// updates. Memory is first reserved for: the arena (at least the largest unit; in a group of one,
// parameters in memory are used in place and need none), the buckets of reductions, the staging of
// collectives, and the smallest NVMe buffers. Then the planner takes the first of these that fits:
// everything in memory; states on NVMe; gradient shards, too; parameters, too. Half of the rest
// goes to buffers and to a second unit in the arena, up to what they can use; the other half keeps
// shards in memory: small parameters, parameters, gradient shards, states. Each shard is decided
// separately: one that fits is kept even if an earlier one did not. So a larger budget never puts
// more bytes on NVMe.
//
// Shards that are to be in host memory and do not fit go to NVMe, if there is any. A plan whose
// given device shards do not fit is refused.
//
// Threads: pure functions.
#pragma once

#include <cstdint>

#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

// Throws ConfigError, with the arithmetic, if it does not fit.
MemoryPlan plan_memory(const ModelShapes& model, const MemoryPlanOptions& options,
                       std::int64_t num_micro_batches);

}  // namespace tessera::planner
