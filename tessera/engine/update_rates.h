// What the processor and the link to a device with memory of its own can do at the same time: from
// it follows which share of the update each gets (planner/update_split.h).
//
// Threads: any; it keeps all cores and the link busy for a moment.
#pragma once

#include "tessera/planner/update_split.h"

namespace tessera {

// Of this machine: AdamW in bf16 by `num_threads`, beside copies up and down. Takes about one GiB
// of host memory and half a second. Throws DeviceError without such a GPU.
planner::UpdateRates measure_update_rates(int cuda_device, int num_threads);

}  // namespace tessera
