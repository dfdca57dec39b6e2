// What the processor and the link to a device with memory of its own can do at the same time: from
// it follows which share of the update each gets (planner/update_split.h).
//
// Threads: any; it keeps all cores and the link busy for a moment.
#pragma once

#include <cstdint>

#include "tessera/planner/update_split.h"

namespace tessera {

// Of this machine: AdamW in bf16 by `num_threads`, beside copies up and down. Takes about one GiB
// of host memory and half a second. Throws DeviceError without such a GPU.
planner::UpdateRates measure_update_rates(int cuda_device, int num_threads);

// A backward that multiplies each parameter with `num_tokens` vectors takes at least this long, by
// the rate of a product in bf16 that is measured. (matmul_rate.cpp)
double least_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens);

}  // namespace tessera
