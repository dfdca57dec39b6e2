// Codes in 32-bit words, packed and unpacked by moving bytes and by adding numbers whose last place
// is known: conversions between integers and floating point, and shifts for every code, would cost
// a GPU more than its memory does (cuda_blocks.cuh). All of it is exact. The host compiles it for
// tests, which try all codes in all places.
//
// Threads: stateless.
#pragma once

#include <cstdint>

#include "tessera/core/host_device.cuh"
#include "tessera/quant/block_rules.cuh"

namespace tessera::quant {

inline constexpr int kWordBits = 32;

// Four bytes of the eight in `low` and `high`: byte k of the result is the one that digit k of
// `digits` numbers, from 0 to 7.
TESSERA_HOST_DEVICE inline std::uint32_t picked_bytes(std::uint32_t low, std::uint32_t high,
                                                      std::uint32_t digits) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, digits);
#else
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t picked = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const std::uint64_t byte = both >> (8 * (digits >> (4 * k) & 7U)) & 0xffU;
    picked |= static_cast<std::uint32_t>(byte) << (8 * k);
  }
  return picked;
#endif
}

// What code_of() gives for `kNum` values, as the bytes of a wire, in the low bits.
template <int kBits, int kNum>
TESSERA_HOST_DEVICE inline std::uint32_t packed_codes(const std::uint32_t* codes) {
  static_assert(kNum * kBits == 16 || kNum * kBits == kWordBits);
  if constexpr (kBits == 8) {
    return picked_bytes(picked_bytes(codes[0], codes[1], 0x0040),
                        picked_bytes(codes[2], codes[3], 0x0040), 0x5410);
  } else {
    std::uint32_t even = picked_bytes(codes[0], codes[2], 0x0040);
    std::uint32_t odd = picked_bytes(codes[1], codes[3], 0x0040);
    if constexpr (kNum == 8) {
      even = picked_bytes(even, picked_bytes(codes[4], codes[6], 0x0040), 0x5410);
      odd = picked_bytes(odd, picked_bytes(codes[5], codes[7], 0x0040), 0x5410);
    }
    const std::uint32_t word = (even & 0x0f0f0f0fU) | (odd << 4 & 0xf0f0f0f0U);
    return kNum == 8 ? word : word & 0xffffU;
  }
}

// Code k of a word. With its sign bit flipped it is the code plus 2^(kBits - 1): as the last bits
// of a number whose last place is worth 1, less what it exceeds the code by. `base` is kCodeBase: a
// kernel takes it from its arguments, so that its compiler has it in a register, and in the
// instruction the digits, which it would have to move there for each code.
inline constexpr std::uint32_t kCodeBase = 0x4b000000U;  // 2^23
template <int kBits>
TESSERA_HOST_DEVICE inline float code_in_fp32(std::uint32_t word, int k, std::uint32_t base) {
  const std::uint32_t flipped = word ^ (kBits == 8 ? 0x80808080U : 0x88888888U);
  std::uint32_t bytes = flipped;
  if constexpr (kBits == 4) {
    bytes = (k % 2 == 0 ? flipped : flipped >> 4) & 0x0f0f0f0fU;
  }
  const auto byte = static_cast<unsigned>(k * kBits / 8);
  return float_of(picked_bytes(bytes, base, 0x7440U | byte)) - (0x1p23F + (kBits == 8 ? 128 : 8));
}

// As above, in fp64. Four bits stay where they are: all of a word is below the exponent, and bit 4k
// of 2^(52 - 4k) is worth 1.
template <int kBits>
TESSERA_HOST_DEVICE inline double code_in_fp64(std::uint32_t word, int k) {
  const int at = kBits == 8 ? 0 : 4 * k;
  const auto exponent = static_cast<std::uint32_t>(52 - at);
  std::uint32_t low = 0;
  if constexpr (kBits == 8) {
    low = picked_bytes(word ^ 0x80808080U, 0, 0x4440U | static_cast<unsigned>(k));
  } else {
    low = (word & (0xfU << at)) ^ (8U << at);
  }
  const std::uint32_t high = (exponent + 1023) << 20;
#if defined(__CUDA_ARCH__)
  const double number = __hiloint2double(static_cast<int>(high), static_cast<int>(low));
#else
  const auto number = __builtin_bit_cast(double, static_cast<std::uint64_t>(high) << 32 | low);
#endif
  return number - (static_cast<double>(std::uint64_t{1} << exponent) + (kBits == 8 ? 128 : 8));
}

}  // namespace tessera::quant
