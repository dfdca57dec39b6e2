// What kernels over blocks of integers on an NVIDIA GPU share. Scales and codes are those of
// block_rules.cuh, so the bytes are the host's: nothing is fused (-fmad=false), divisions are
// IEEE's, subnormal numbers stay.
//
// [Note: kernels at the speed of memory]
// What keeps these kernels from it are instructions: where a value takes 2 bytes and its code half
// of one, an H200 can issue about 18 for each value in the time that its memory needs, and fewer of
// those that are not sums or products. So codes are packed and unpacked in words (block_words.cuh),
// what belongs to a block is computed once in it, and there is one way without choices for whole
// vectors and scales that nothing overflows with; everything else is rare, and done apart, value by
// value. A thread asks for several vectors before it uses the first one. CUDA blocks have a piece
// of the array each and end with it, so that some read while others write.
//
// Threads: stateless. For CUDA sources only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>

#include "tessera/device/cuda_convert.cuh"
#include "tessera/quant/block_rules.cuh"
#include "tessera/quant/block_words.cuh"
#include "tessera/quant/cuda_launch.h"

namespace tessera::quant::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kRow = 32;  // values: blocks are whole ones
inline constexpr unsigned kAllLanes = 0xffffffffU;

// Values of one access of 16 bytes, and their codes: code k from bit k * kBits on.
template <typename Value>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(Value));

template <int kBytes>
struct CodesOf;
template <>
struct CodesOf<2> {
  using Type = std::uint16_t;
};
template <>
struct CodesOf<4> {
  using Type = std::uint32_t;
};
template <>
struct CodesOf<8> {
  using Type = std::uint64_t;
};
template <int kBits, int kWidth>
using Codes = typename CodesOf<kBits * kWidth / 8>::Type;

template <int kBits>
inline constexpr int kCodesOfWord = kWordBits / kBits;

// What a NaN carries is lost in halves: nothing here looks at it.
__device__ inline float as_fp32(float value) { return value; }
__device__ inline float as_fp32(BFloat16 value) { return device::cuda::widened(value); }
__device__ inline float as_fp32(Float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

template <typename Value, int kWidth>
struct alignas(kWidth * sizeof(Value)) Several {
  Value values[kWidth];
};

// Code i of a wire.
template <int kBits>
__device__ int code_at(const std::byte* wire, std::int64_t i) {
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(wire);
  if constexpr (kBits == 8) {
    return static_cast<std::int8_t>(codes[i]);
  } else {
    return signed_nibble(static_cast<std::uint32_t>(codes[i / 2]) >> (i % 2 * 4));
  }
}

// Where a value is: its block, and the rows of 32 values before its own in that.
struct Place {
  std::int64_t block;
  std::uint32_t rows;
};

// A quotient x / d is the high half of (x + 1) * ((2^n - 1) / d), rounded down, for x * d < 2^n:
// what was x + 1 = k * d gives a little less than k, and nothing else comes near a whole number.
// Blocks have at most 2^15 rows, so values up to 2^54 have their place.
struct Blocks {
  std::int64_t numel;
  int shift;                     // -1: numel is no power of two
  std::uint32_t rows;            // of a block
  std::uint64_t inverse;         // of `rows`, for n = 64
  std::uint32_t inverse_of_few;  // and for n = 32, where x is below 2^17

  __device__ std::int64_t of(std::int64_t i) const {
    return static_cast<std::int64_t>(__umul64hi(static_cast<std::uint64_t>(i / kRow) + 1, inverse));
  }
  __device__ Place place_of(std::int64_t i) const {
    const std::int64_t block = of(i);
    return {block, static_cast<std::uint32_t>(i / kRow) - static_cast<std::uint32_t>(block) * rows};
  }
  // Of a value that is `num` rows behind a place, fewer than 2^16.
  __device__ std::int64_t behind(const Place& place, std::uint32_t num) const {
    return place.block + __umulhi(place.rows + num + 1, inverse_of_few);
  }
};

inline Blocks blocks_of(const BlockFormat& format) {
  const auto numel = static_cast<std::uint64_t>(format.block_numel);
  const auto rows = static_cast<std::uint32_t>(numel / kRow);
  return {format.block_numel, std::has_single_bit(numel) ? std::countr_zero(numel) : -1, rows,
          ~std::uint64_t{0} / rows, ~std::uint32_t{0} / rows};
}

struct Decoding {
  std::int64_t numel;
  std::size_t stride;     // between wires
  std::size_t scales_at;  // in each
  int num_wires;
  Blocks blocks;
  std::uint32_t code_base;  // kCodeBase
  bool is_aligned;
};

__device__ inline std::uint16_t scale_at(const Decoding& decoding, const std::byte* wire,
                                         std::int64_t block) {
  return reinterpret_cast<const std::uint16_t*>(wire + decoding.scales_at)[block];
}

inline Decoding decoding_of(const BlockFormat& format, std::int64_t numel) {
  return {numel, wire_bytes(format, numel), code_bytes(format, numel),
          1,     blocks_of(format),         kCodeBase,
          false};
}

inline bool is_aligned_to(const void* data, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

// work(type, bits) for the type of values and the bits of a code.
template <typename Work>
void with_type(const BlockFormat& format, DType dtype, const Work& work) {
  const auto with_bits = [&](auto type) {
    if (format.bits == 8) {
      work(type, std::integral_constant<int, 8>{});
    } else {
      work(type, std::integral_constant<int, 4>{});
    }
  };
  if (dtype == DType::kFloat32) {
    with_bits(std::type_identity<float>{});
  } else if (dtype == DType::kBFloat16) {
    with_bits(std::type_identity<BFloat16>{});
  } else {
    with_bits(std::type_identity<Float16>{});
  }
}

// CUDA blocks for `num` of what each of them has `of_block`.
inline unsigned grid_of(std::int64_t num, std::int64_t of_block) {
  return static_cast<unsigned>((num + of_block - 1) / of_block);
}

}  // namespace tessera::quant::cuda
