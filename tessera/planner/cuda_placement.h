// Internal to planner: places and sizes on a device with memory of its own, within two budgets.
//
// Small parameters (up to kSmallParamBytes) are on the device in every respect. Of the others, in
// the order of use:
//   parameters  as wished; by themselves on the device as far as it goes, then in host memory,
//               then on NVMe;
//   states      as wished (in host memory what the budget holds, the rest on NVMe); by themselves
//               on the device as far as it goes once all parameters have their place, then in host
//               memory, then on NVMe;
//   gradients   on the device where it updates, else in host memory.
// Under a budget states leave host memory first, then parameters. A wish for the device or for host
// memory that the budget does not allow goes to NVMe from host memory, and is refused otherwise.
//
// Who updates is told by update_split.h.
//
// On the device, before states and parameters are put there by themselves, there is room for a few
// slots of streamed sub-groups and for a few units in the arena. What is left goes to more slots,
// then to the arena until it holds all that is gathered. A larger budget stores no more, up to the
// states of a few parameters, which give way to other parameters on the device.
//
// Threads: pure functions.
#pragma once

#include "tessera/planner/placement_cost.h"

namespace tessera::planner {

// Complete. Throws ConfigError, with the arithmetic, if it does not fit into memory.
Placement place_on_cuda(const CutModel& cut, std::int64_t num_micro_batches);

}  // namespace tessera::planner
