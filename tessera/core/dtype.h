// Element types that Tessera moves and adds, and the conversions between them.
//
// Torch-free on purpose: layout arithmetic, collectives and update kernels work on raw memory with
// a DType, so that they build in seconds and run under the sanitizers. Conversions round to nearest
// even, keep infinities, and turn a NaN into a quiet NaN, exactly as ATen and the GPU do.
//
// Threads: stateless.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt64, kInt32, kUInt8 };

std::string_view to_string(DType dtype);

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
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  const std::uint32_t round = 0x7fffU + ((bits >> 16) & 1U);
  return {static_cast<std::uint16_t>((bits + round) >> 16)};
}

float to_float(Float16 value);
Float16 to_float16(float value);

}  // namespace tessera
