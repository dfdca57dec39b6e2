// Elements on an NVIDIA GPU: their types, four of them in one access, and how spans are cut into
// head, fours and tail. The bits of conversions are those of core/dtype.h, NaNs included.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tessera/core/dtype.h"
#include "tessera/device/cuda_call.h"

namespace tessera::optim::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWidth = 4;  // elements of one vector access; 16 bytes of fp32

__device__ inline float widened(float value) { return value; }
__device__ inline float widened(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ inline float widened(Float16 value) {
  const unsigned magnitude = value.bits & 0x7fffU;
  if (magnitude > 0x7c00U) {  // the unit's conversion would lose what a NaN carries
    return __uint_as_float((static_cast<unsigned>(value.bits & 0x8000U) << 16) | 0x7f800000U |
                           (magnitude << 13));
  }
  return __half2float(__ushort_as_half(value.bits));
}

__device__ inline void narrow(float value, float& out) { out = value; }
__device__ inline void narrow(float value, BFloat16& out) {
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const unsigned quiet_nan = (bits >> 16) | 0x40U;
  out.bits = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet_nan : rounded);
}
__device__ inline void narrow(float value, Float16& out) {
  const unsigned bits = __float_as_uint(value);
  const unsigned magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    out.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | 0x7e00U |
                                          ((magnitude >> 13) & 0x3ffU));
  } else {
    out.bits = __half_as_ushort(__float2half_rn(value));
  }
}

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
