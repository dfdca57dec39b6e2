// Element types that Tessera moves and adds, and the conversions between them.
//
// Torch-free on purpose: layout arithmetic, collectives and update kernels work on raw memory with
// a DType, so that they build in seconds and run under the sanitizers. Conversions round to nearest
// even, keep infinities, and turn a NaN into a quiet NaN, exactly as ATen and the GPU do.
//
// Threads: stateless.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt64, kInt32, kUInt8 };

constexpr std::string_view to_string(DType dtype) {
  constexpr std::array<std::string_view, 7> kNames = {"fp32",  "bf16",  "fp16", "fp64",
                                                      "int64", "int32", "uint8"};
  return kNames[static_cast<std::size_t>(dtype)];
}

constexpr std::size_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

// Storage-only types: arithmetic is done in float.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet_nan : rounded)};
}

// Without branches, so that loops over halves become vector code.
inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  // The bits of a half, moved to the place of a float's, are the half times 2^-112; the product is
  // exact, also for subnormals. Infinity and NaN come out at 2^16 and above.
  const float scaled =
      std::bit_cast<float>(static_cast<std::uint32_t>(value.bits & 0x7fffU) << 13) * 0x1p112F;
  const std::uint32_t special = scaled >= 65536.0F ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | sign);
}

inline Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // From 2^-14 on: rebias, and round to nearest even; from 65520 on that carries into infinity.
  const std::uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // Below: adding 0.5 lets the float unit shift and round, since its last place is then 2^-24, the
  // smallest half.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) & 0x7ffU;
  const std::uint32_t finite = magnitude < 0x38800000U    ? subnormal
                               : magnitude >= 0x477ff000U ? 0x7c00U
                                                          : normal;
  const std::uint32_t quiet_nan = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  return {static_cast<std::uint16_t>(sign | (magnitude > 0x7f800000U ? quiet_nan : finite))};
}

}  // namespace tessera
