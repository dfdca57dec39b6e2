// What the CPU and the link to a discrete device can do at the same time: from
// it follows which share of the update each gets (planner/update_split.h).
//
// Threads: any; it keeps all cores and the link busy for a moment.
#pragma once

#include <cstdint>

#include "tessera/optim/core_binding.h"
#include "tessera/planner/update_split.h"

namespace tessera {

// What is measured with: beyond every cache, which is hundreds of MiB in servers, where host memory
// allows.
struct UpdateRateSizes {
  std::int64_t numel = 0;       // that are updated in turn, a span at a time; 16 bytes each
  std::int64_t span_numel = 0;  // divides them
  std::size_t copy_bytes = 0;   // of a copy, at one of four places each way

  std::int64_t host_bytes() const;
};
// Two GiB, or what fits into the part that measuring may take of `free_host_bytes`, a rank's share
// of what is free; a few MiB at least.
UpdateRateSizes update_rate_sizes(std::int64_t free_host_bytes);

// Of this machine: AdamW in bf16 by `num_threads` on the cores of `share`, beside copies up and
// down. Ranks of a host call it at once, so that each finds its part. Takes a second. Throws
// DeviceError without such a GPU.
planner::UpdateRates measure_update_rates(int cuda_device, int num_threads,
                                          const optim::CoreShare& share,
                                          const UpdateRateSizes& sizes);

// How long a backward takes that multiplies each parameter with `num_tokens` vectors, by the rate
// of a product in bf16 that is measured.
double expected_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens);

}  // namespace tessera
