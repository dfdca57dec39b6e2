// Elements on an NVIDIA GPU, widened to fp32 and rounded back: the bits are those of core/dtype.h,
// NaNs included.
//
// Threads: stateless.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tessera/core/dtype.h"

namespace tessera::device::cuda {

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

}  // namespace tessera::device::cuda
