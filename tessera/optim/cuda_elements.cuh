// Elements on an NVIDIA GPU: their types, four of them in one access, and how spans are cut into
// head, fours and tail.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <cuda_runtime.h>

#include "tessera/core/dtype.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_convert.cuh"

namespace tessera::optim::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWidth = 4;  // elements of one vector access; 16 bytes of fp32

using device::cuda::narrow;
using device::cuda::widened;

template <typename Value>
struct Four {
  Value values[kWidth];
};

// One aligned access each. Stores are spelled out, since the compiler would take some of them
// apart.
__device__ inline Four<float> load_four(const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  return {{four.x, four.y, four.z, four.w}};
}
template <typename Half>
__device__ Four<Half> load_four(const Half* from) {
  static_assert(sizeof(Half) == 2);
  const uint2 two = *reinterpret_cast<const uint2*>(from);
  return {{{static_cast<std::uint16_t>(two.x)},
           {static_cast<std::uint16_t>(two.x >> 16)},
           {static_cast<std::uint16_t>(two.y)},
           {static_cast<std::uint16_t>(two.y >> 16)}}};
}
__device__ inline void store_four(float* to, const Four<float>& four) {
  const float* v = four.values;
  __stwb(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
template <typename Half>
__device__ void store_four(Half* to, const Four<Half>& four) {
  static_assert(sizeof(Half) == 2);
  const auto pair = [&](int k) {
    return static_cast<unsigned>(four.values[k].bits) |
           (static_cast<unsigned>(four.values[k + 1].bits) << 16);
  };
  __stwb(reinterpret_cast<uint2*>(to), make_uint2(pair(0), pair(2)));
}

// Memory that a kernel goes through, all with the same number of elements.
struct Column {
  const void* data = nullptr;  // null: there is none
  std::size_t element_bytes = 0;
};

// Elements before the first one from which on all columns are aligned for vector accesses, or
// `numel` where there is none: then every element is accessed alone.
inline std::int64_t head_numel(std::initializer_list<Column> columns, std::int64_t numel) {
  for (std::int64_t head = 0; head < kWidth && head < numel; ++head) {
    bool is_aligned = true;
    for (const Column& column : columns) {
      const auto address = reinterpret_cast<std::uintptr_t>(column.data) +
                           static_cast<std::uintptr_t>(head) * column.element_bytes;
      is_aligned &= column.data == nullptr || address % (kWidth * column.element_bytes) == 0;
    }
    if (is_aligned) {
      return head;
    }
  }
  return numel;
}

// Blocks that fill the current device, with `per_processor` on each of its processors, or fewer
// where there are fewer `parts`.
inline unsigned grid_of(std::int64_t parts, int per_processor) {
  int index = 0;
  int num_processors = 0;
  TESSERA_CUDA_CALL(cudaGetDevice, &index);
  TESSERA_CUDA_CALL(cudaDeviceGetAttribute, &num_processors, cudaDevAttrMultiProcessorCount, index);
  const std::int64_t most = static_cast<std::int64_t>(num_processors) * per_processor;
  return static_cast<unsigned>(parts < most ? parts : most);
}

}  // namespace tessera::optim::cuda
