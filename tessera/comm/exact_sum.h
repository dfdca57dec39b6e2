// Reductions whose result depends on nothing but the numbers and the order of the ranks.
//
// Every element is reduced for itself: rank 0's value, then rank 1's, and so on, in fp32 (fp64 and
// integers in their own type), rounded once at the end. Block sizes, vector widths and threads
// cannot change a bit. A NaN in any part gives a NaN, also for max and min.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/core/dtype.h"

namespace tessera::comm {

enum class Reduction : std::uint8_t { kSum, kMax, kMin };

// `num_parts` arrays of `numel` elements behind each other, in rank order.
struct RankParts {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int num_parts = 1;
  std::size_t numel = 0;
};

// ConfigError unless out_dtype is dtype, or fp32 where that is bf16 or fp16.
void check_reduction(DType dtype, DType out_dtype);

// REQUIRES: what check_reduction() checks. `out` may not overlap the parts, except that it may be
// the first of them.
void reduce_in_rank_order(const RankParts& parts, void* out, DType out_dtype, Reduction reduction);
// The same for parts of `numel` elements that lie anywhere; `out` may be any one of them.
void reduce_in_rank_order(std::span<const std::byte* const> parts, DType dtype, std::size_t numel,
                          void* out, DType out_dtype, Reduction reduction);

}  // namespace tessera::comm
