// The arithmetic of blocks, for one scale and for one value: included by the loops of the host
// (block_loops.cpp) and by the kernels of the GPU, so that there is one of each.
//
// Every operation is IEEE's in fp32, and rounds once: compilers must not fuse (the host's
// -ffp-contract=off, nvcc's -fmad=false), and divisions are exact. A NaN is always the same one.
// What is decoded is exact, so sums have the same bits where a compiler fuses them after all.
//
// Threads: stateless.
#pragma once

#include <cstdint>

#include "tessera/core/dtype.h"
#include "tessera/core/host_device.cuh"

namespace tessera::quant {

inline constexpr std::uint16_t kNanScale = 0x7fc0;
inline constexpr std::uint16_t kSmallestScale = 0x0080;  // 2^-126: its inverse is finite

TESSERA_HOST_DEVICE constexpr int largest_code(int bits) { return (1 << (bits - 1)) - 1; }

template <typename Value>
struct ValueLimits;
// largest: finite. largest_scale: in bf16, and not above it.
template <>
struct ValueLimits<float> {
  static constexpr float kLargest = 0x1.fffffep127F;
  static constexpr std::uint16_t kLargestScale = 0x7f7f;
};
template <>
struct ValueLimits<BFloat16> {
  static constexpr float kLargest = 0x1.fep127F;
  static constexpr std::uint16_t kLargestScale = 0x7f7f;
};
template <>
struct ValueLimits<Float16> {
  static constexpr float kLargest = 65504.0F;
  static constexpr std::uint16_t kLargestScale = 0x477f;  // 65280
};

TESSERA_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
TESSERA_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
TESSERA_HOST_DEVICE inline float canonical_nan() { return float_of(0x7fc00000U); }

// `absmax`: the bits of the largest magnitude; those of a NaN are above all others.
template <int kBits>
TESSERA_HOST_DEVICE inline std::uint16_t scale_for(std::uint32_t absmax) {
  if (absmax >= 0x7f800000U) {
    return kNanScale;
  }
  if (absmax == 0) {
    return 0;
  }
  const float quotient = float_of(absmax) / static_cast<float>(largest_code(kBits));
  const std::uint32_t up = (bits_of(quotient) + 0xffffU) >> 16;
  return static_cast<std::uint16_t>(up < kSmallestScale ? kSmallestScale : up);
}

TESSERA_HOST_DEVICE inline float widened_scale(std::uint16_t scale) {
  return float_of(static_cast<std::uint32_t>(scale) << 16);
}

// What values are multiplied by. Zero for a block that has no codes but zero: then no value may be
// used, since one of them may be infinite.
TESSERA_HOST_DEVICE inline float inverse_scale(std::uint16_t scale) {
  return scale == 0 || scale >= 0x7f80 ? 0.0F : 1.0F / widened_scale(scale);
}

// The code of a value, in the low bits. The sum's last place is 1, so it is rounded to a whole
// number, to nearest even, and what is below the bits of 1.5 * 2^23 is that number.
TESSERA_HOST_DEVICE inline std::uint32_t code_of(float value, float inverse) {
  return bits_of(value * inverse + 0x1.8p23F);
}

// The sign of four bits.
TESSERA_HOST_DEVICE inline int signed_nibble(std::uint32_t nibble) {
  return static_cast<int>((nibble & 0xfU) ^ 8U) - 8;
}

// Nothing but the product is needed: it is finite for every code in every type of values up to
// `Value`, rounded or not.
template <int kBits, typename Value>
TESSERA_HOST_DEVICE inline bool is_plain(std::uint16_t scale) {
  constexpr std::uint16_t kMost = ValueLimits<Value>::kLargestScale - (kBits - 1) * 0x80;
  return scale <= kMost;
}

// What a code stands for, before it is rounded to Value; for every scale.
template <typename Value>
TESSERA_HOST_DEVICE inline float decoded(int code, std::uint16_t scale) {
  constexpr float kLargest = ValueLimits<Value>::kLargest;
  if (scale >= 0x7f80) {
    return canonical_nan();
  }
  const float step = widened_scale(scale);
  const float magnitude = static_cast<float>(code < 0 ? -code : code);
  const float product = magnitude * step;
  const float kept =
      product > kLargest && (magnitude - 0.5F) * step <= kLargest ? kLargest : product;
  return code < 0 ? -kept : kept;
}

TESSERA_HOST_DEVICE inline float with_canonical_nan(float value) {
  return (bits_of(value) & 0x7fffffffU) > 0x7f800000U ? canonical_nan() : value;
}

}  // namespace tessera::quant
