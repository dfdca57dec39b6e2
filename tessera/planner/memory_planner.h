// From byte budgets to a plan of memory. Pure: nothing is allocated, and the same input gives the
// same plan on every machine with pages of the same size.
//
// What is asked for by tier (place.*) is where it was asked for; the rest is in device memory, as
// far as budgets go, then in host memory, then on NVMe. Shards are kept in the order of use.
//
// A discrete device and its host have a budget each. Small parameters (MemoryPlanOptions) are
// on the device in every respect. Of the others:
//   parameters  on the device as far as it goes, then in host memory, then on NVMe;
//   states      on the device once all parameters are there, then in host memory, then on NVMe;
//   gradients   on the device where it updates, else in host memory;
//   secondary shards  on the device before parameters and states that were not asked to be there,
//               the rest in host memory.
// Before shards are put on the device there is room for a few slots of streamed sub-groups and for
// a few units in the arena. What is left goes to more slots, then to the arena until it holds all
// that is gathered. Under a host budget states leave for NVMe first, then parameters. A larger
// budget puts no more on NVMe, up to the states of a few parameters, which give way to other
// parameters on the device. Who updates is told by update_split.h.
//
// On a CPU device and host are one memory, bounded by the smaller of both budgets, and the CPU
// updates. What must be in memory comes first: the arena (at least the largest unit; in a group of
// one, parameters in memory are used where they are and need none), the buckets of reductions, the
// staging of the network's calls, the buffers of NVMe at their smallest. Then the first of these
// that fits: everything in memory; states leave for NVMe; gradient shards, too; parameters, too.
// Half of the rest goes to buffers and to a second unit in the arena until they have what they can
// use; the other half keeps shards: small parameters, parameters, gradient shards, states. Shard by
// shard: a later one that fits stays where an earlier one did not, and so a larger budget never
// puts more bytes on NVMe.
//
// What was asked to be in host memory, and does not fit, is on NVMe where there is any; what was
// asked to be on the device, and does not fit, is refused.
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
