// What the CPU and the link to a discrete device can do at the same time: from
// it follows which share of the update each gets (planner/update_split.h).
//
// Threads: any; it keeps all cores and the link busy for a moment.
#pragma once

#include <cstdint>

#include "tessera/optim/core_binding.h"
#include "tessera/planner/update_split.h"

namespace tessera {

// Of this machine: AdamW in bf16 by `num_threads` on the cores of `share`, beside copies up and
// down. Ranks of a host call it at once, so that each finds its part. Takes two GiB of host memory
// and a second. Throws DeviceError without such a GPU.
planner::UpdateRates measure_update_rates(int cuda_device, int num_threads,
                                          const optim::CoreShare& share = {});

// How long a backward takes that multiplies each parameter with `num_tokens` vectors, by the rate
// of a product in bf16 that is measured.
double expected_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens);

}  // namespace tessera
