// reduce_in_rank_order() of exact_sum.h on an NVIDIA GPU. For CUDA sources only.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <span>

#include <cuda_runtime_api.h>

#include "tessera/comm/exact_sum.h"
#include "tessera/core/dtype.h"

namespace tessera::comm {

// What a kernel is given as one argument.
inline constexpr std::size_t kMaxSummedRanks = 128;

// Brings all kernels onto the current device. CUDA loads a kernel when it is first launched, and
// may wait for all streams then: for one that stands still until the kernel has run, too.
void load_rank_sums();

// Parts and `out` are memory that the current device reaches, also another GPU's; `out` may be any
// one of the parts. REQUIRES: what check_reduction() checks, and at most kMaxSummedRanks parts.
void launch_rank_sum(std::span<const std::byte* const> parts, DType dtype, std::size_t numel,
                     void* out, DType out_dtype, Reduction reduction, cudaStream_t stream);

}  // namespace tessera::comm
