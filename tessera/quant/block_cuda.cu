// Blocks of integers on an NVIDIA GPU. Scales and codes are those of block_rules.cuh, so the bytes
// are the host's: nothing is fused (-fmad=false), divisions are IEEE's, subnormal numbers stay.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_convert.cuh"
#include "tessera/quant/block_rules.cuh"
#include "tessera/quant/block_words.cuh"
#include "tessera/quant/cuda_launch.h"

namespace tessera::quant::cuda {
namespace {

using device::cuda::narrow;

// [Note: kernels at the speed of memory]
// What keeps these kernels from it are instructions: where a value takes 2 bytes and its code half
// of one, an H200 can issue about 18 for each value in the time that its memory needs, and fewer of
// those that are not sums or products. So codes are packed and unpacked in words (block_words.cuh),
// what belongs to a block is computed once in it, and there is one way without choices for whole
// vectors and scales that nothing overflows with; everything else is rare, and done apart, value by
// value. A thread asks for several vectors before it uses the first one. CUDA blocks have a piece
// of the array each and end with it, so that some read while others write.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerProcessor = 8;  // of a grid that goes round
constexpr int kRow = 32;                // values: blocks are whole ones
constexpr unsigned kAllLanes = 0xffffffffU;

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

// The word of code k, and its number there.
template <int kBits>
inline constexpr int kCodesOfWord = kWordBits / kBits;
template <int kBits, typename Packed>
__device__ std::uint32_t word_of(Packed codes, int k) {
  if constexpr (sizeof(Packed) == 8) {
    return static_cast<std::uint32_t>(codes >> (k / kCodesOfWord<kBits> * kWordBits));
  } else {
    return codes;
  }
}

// What a NaN carries is lost in halves: nothing here looks at it.
__device__ float as_fp32(float value) { return value; }
__device__ float as_fp32(BFloat16 value) { return device::cuda::widened(value); }
__device__ float as_fp32(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

template <typename Value, int kWidth>
struct alignas(kWidth * sizeof(Value)) Several {
  Value values[kWidth];
};

// kWidth values from `i` on, one access where that can be; zeros from `numel` on.
template <int kWidth, typename Value>
__device__ Several<Value, kWidth> load(const Value* values, std::int64_t i, std::int64_t numel,
                                       bool is_aligned) {
  if (is_aligned && i + kWidth <= numel) {
    return *reinterpret_cast<const Several<Value, kWidth>*>(values + i);
  }
  Several<Value, kWidth> out;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    out.values[k] = i + k < numel ? values[i + k] : Value{};
  }
  return out;
}

// 16 bytes of values as they are: the arithmetic takes halves from their words.
struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <typename Value>
__device__ float value_in(const Vector& vector, int k) {
  if constexpr (std::is_same_v<Value, float>) {
    return float_of(vector.words[k]);
  } else if constexpr (std::is_same_v<Value, BFloat16>) {
    const std::uint32_t word = vector.words[k / 2];
    return float_of(k % 2 == 0 ? word << 16 : word & 0xffff0000U);
  } else {
    const std::uint32_t word = vector.words[k / 2];
    return as_fp32(Float16{static_cast<std::uint16_t>(k % 2 == 0 ? word : word >> 16)});
  }
}

template <typename Value>
__device__ Vector load_vector(const Value* values, std::int64_t i, std::int64_t numel,
                              bool is_aligned) {
  return __builtin_bit_cast(Vector, load<kVector<Value>>(values, i, numel, is_aligned));
}

template <typename Value, int kWidth>
__device__ void store(Value* values, std::int64_t i, std::int64_t numel, bool is_aligned,
                      const Several<Value, kWidth>& several) {
  if (is_aligned && i + kWidth <= numel) {
    *reinterpret_cast<Several<Value, kWidth>*>(values + i) = several;
    return;
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    if (i + k < numel) {
      values[i + k] = several.values[k];
    }
  }
}

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

Blocks blocks_of(const BlockFormat& format) {
  const auto numel = static_cast<std::uint64_t>(format.block_numel);
  const auto rows = static_cast<std::uint32_t>(numel / kRow);
  return {format.block_numel, std::has_single_bit(numel) ? std::countr_zero(numel) : -1, rows,
          ~std::uint64_t{0} / rows, ~std::uint32_t{0} / rows};
}

struct Encoding {
  std::int64_t numel;
  Blocks blocks;
  std::int64_t num_blocks;
  std::int64_t coded_numel;    // with those that pad the codes
  std::int64_t scaled_blocks;  // with those that pad the scales
  int team;                    // threads of one block: a power of two, at most a warp
  int team_vectors;            // of one thread in one block
  bool is_aligned;
};

__device__ std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

template <typename Value>
__device__ std::uint32_t absmax_of(const Vector& vector) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kVector<Value>; ++k) {
    largest = larger(largest, bits_of(value_in<Value>(vector, k)) & 0x7fffffffU);
  }
  return largest;
}

template <int kBits, typename Value>
__device__ Codes<kBits, kVector<Value>> codes_of(const Vector& vector, float inverse) {
  constexpr int kWidth = kVector<Value>;
  std::uint32_t codes[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    codes[k] = code_of(value_in<Value>(vector, k), inverse);
  }
  // The choice comes last, so that there is one for all.
  constexpr int kNum = kWidth < kCodesOfWord<kBits> ? kWidth : kCodesOfWord<kBits>;
  Codes<kBits, kWidth> packed = packed_codes<kBits, kNum>(codes);
  if constexpr (kNum < kWidth) {
    packed |= static_cast<std::uint64_t>(packed_codes<kBits, kNum>(codes + kNum)) << kWordBits;
  }
  return inverse == 0.0F ? Codes<kBits, kWidth>{0} : packed;
}

// Blocks of every size, from every address: a team of threads has a block at a time, and each of
// them every team-th vector of it. The first one stays in registers, and others are read twice.
template <int kBits, typename Value>
__global__ void __launch_bounds__(kThreads)
    encode_blocks(const __grid_constant__ Encoding encoding, const Value* __restrict__ values,
                  std::byte* __restrict__ codes, std::uint16_t* __restrict__ scales) {
  constexpr int kWidth = kVector<Value>;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const int lane = static_cast<int>(threadIdx.x) % encoding.team;
  const int step = encoding.team * kWidth;
  auto* const out = reinterpret_cast<Codes<kBits, kWidth>*>(codes);
  if (thread < encoding.scaled_blocks - encoding.num_blocks) {
    scales[encoding.num_blocks + thread] = 0;
  }
  // Teams behind the last block take part with nothing: the shuffle needs the whole warp.
  const std::int64_t warp = (thread - threadIdx.x % kWarp) / encoding.team;
  const std::int64_t team_in_warp = threadIdx.x % kWarp / static_cast<unsigned>(encoding.team);
  for (std::int64_t first = warp; first < encoding.num_blocks;
       first += num_threads / encoding.team) {
    const std::int64_t block = first + team_in_warp;
    const std::int64_t begin = block * encoding.blocks.numel;
    const std::int64_t block_end = begin + encoding.blocks.numel;
    const std::int64_t end = block_end < encoding.numel ? block_end : encoding.numel;
    const std::int64_t own = begin + lane * kWidth;
    const Vector kept = load_vector(values, own, end, encoding.is_aligned);
    std::uint32_t absmax = absmax_of<Value>(kept);
    for (std::int64_t i = own + step; i < end; i += step) {
      absmax = larger(absmax, absmax_of<Value>(load_vector(values, i, end, encoding.is_aligned)));
    }
    for (int half = encoding.team / 2; half > 0; half /= 2) {
      absmax = larger(absmax, __shfl_xor_sync(kAllLanes, absmax, half));
    }
    const std::uint16_t scale = scale_for<kBits>(absmax);
    const float inverse = inverse_scale(scale);
    const std::int64_t coded_end =
        block_end < encoding.coded_numel ? block_end : encoding.coded_numel;
    if (own < coded_end) {
      out[own / kWidth] = codes_of<kBits, Value>(kept, inverse);
    }
    for (std::int64_t i = own + step; i < coded_end; i += step) {
      out[i / kWidth] =
          codes_of<kBits, Value>(load_vector(values, i, end, encoding.is_aligned), inverse);
    }
    if (lane == 0 && block < encoding.num_blocks) {
      scales[block] = scale;
    }
  }
}

// The largest magnitude in each of kAhead vectors, as bits: integers that are in their order.
constexpr int kAhead = 4;

template <typename Value>
class Peaks;

template <>
class Peaks<float> {
 public:
  __device__ explicit Peaks(const Vector (&vectors)[kAhead]) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      of_[u] = absmax_of<float>(vectors[u]);
    }
  }
  // Over `num` vectors next to one another.
  __device__ void join_vectors(int num) {
    if (num > 1) {
      of_[0] = of_[1] = larger(of_[0], of_[1]);
      of_[2] = of_[3] = larger(of_[2], of_[3]);
    }
    if (num > 2) {
      of_[0] = of_[1] = of_[2] = of_[3] = larger(of_[0], of_[2]);
    }
  }
  // With that of the lane whose number differs by `half`.
  __device__ void join_lanes(int half) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      of_[u] = larger(of_[u], __shfl_xor_sync(kAllLanes, of_[u], half));
    }
  }
  // Of vector u, as fp32.
  __device__ std::uint32_t of(int u) const {
    const std::uint32_t low = u % 2 == 0 ? of_[0] : of_[1];
    const std::uint32_t high = u % 2 == 0 ? of_[2] : of_[3];
    return u < 2 ? low : high;
  }

 private:
  std::uint32_t of_[kAhead];
};

// Two in a word.
template <typename Half>
class Peaks {
 public:
  __device__ explicit Peaks(const Vector (&vectors)[kAhead]) {
    std::uint32_t of_one[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const auto& words = vectors[u].words;
      of_one[u] = __vmaxu2(__vmaxu2(words[0] & kMagnitudes, words[1] & kMagnitudes),
                           __vmaxu2(words[2] & kMagnitudes, words[3] & kMagnitudes));
    }
#pragma unroll
    for (int pair = 0; pair < kAhead / 2; ++pair) {
      of_[pair] = __vmaxu2(picked_bytes(of_one[2 * pair], of_one[2 * pair + 1], 0x5410),
                           picked_bytes(of_one[2 * pair], of_one[2 * pair + 1], 0x7632));
    }
  }
  __device__ void join_vectors(int num) {
    if (num > 1) {
      of_[0] = __vmaxu2(of_[0], picked_bytes(of_[0], 0, 0x1032));
      of_[1] = __vmaxu2(of_[1], picked_bytes(of_[1], 0, 0x1032));
    }
    if (num > 2) {
      of_[0] = of_[1] = __vmaxu2(of_[0], of_[1]);
    }
  }
  __device__ void join_lanes(int half) {
#pragma unroll
    for (int pair = 0; pair < kAhead / 2; ++pair) {
      of_[pair] = __vmaxu2(of_[pair], __shfl_xor_sync(kAllLanes, of_[pair], half));
    }
  }
  __device__ std::uint32_t of(int u) const {
    const std::uint32_t pair = u < 2 ? of_[0] : of_[1];
    return bits_of(as_fp32(Half{static_cast<std::uint16_t>(u % 2 == 0 ? pair : pair >> 16)}));
  }

 private:
  static constexpr std::uint32_t kMagnitudes = 0x7fff7fffU;

  std::uint32_t of_[kAhead / 2];
};

// Whole blocks within a warp's piece, kAhead vectors of each lane, from an aligned address. A block
// is vectors of a team, next to one another. Every lane knows the largest magnitudes of its team's
// vectors, computes one of their scales, and gets the others from the lanes beside it.
template <int kBits, typename Value>
__global__ void __launch_bounds__(kThreads)
    encode_pieces(const __grid_constant__ Encoding encoding, const Value* __restrict__ values,
                  std::byte* __restrict__ codes, std::uint16_t* __restrict__ scales) {
  constexpr int kWidth = kVector<Value>;
  constexpr std::int64_t kPiece = kAhead * kWarp;  // vectors
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t piece = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const std::int64_t own = piece * kPiece + lane;  // its first vector
  if (piece == 0 && lane < encoding.scaled_blocks - encoding.num_blocks) {
    scales[encoding.num_blocks + lane] = 0;
  }
  const bool is_whole = (piece + 1) * kPiece * kWidth <= encoding.numel;
  Vector vectors[kAhead];
  if (is_whole) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      vectors[u] = reinterpret_cast<const Vector*>(values)[own + u * kWarp];
    }
  } else {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      vectors[u] = load_vector(values, (own + u * kWarp) * kWidth, encoding.numel, true);
    }
  }
  Peaks<Value> peaks(vectors);
  peaks.join_vectors(encoding.team_vectors);
  for (int half = encoding.team / 2; half > 0; half /= 2) {
    peaks.join_lanes(half);
  }
  const int scaled = lane % kAhead;  // the vector whose scale this lane computes
  const std::uint16_t scale = scale_for<kBits>(peaks.of(scaled));
  const float inverse = inverse_scale(scale);
  const int in_team = lane & (encoding.team - 1);
  if (in_team < kAhead && (scaled & (encoding.team_vectors - 1)) == 0) {
    const std::int64_t block = (own - in_team + scaled * kWarp) * kWidth >> encoding.blocks.shift;
    if (block < encoding.num_blocks) {
      scales[block] = scale;
    }
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const float of_block = __shfl_sync(kAllLanes, inverse, lane - scaled + u);
    const std::int64_t at = own + u * kWarp;
    const auto packed = codes_of<kBits, Value>(vectors[u], of_block);
    if (is_whole || at * kWidth < encoding.coded_numel) {
      reinterpret_cast<Codes<kBits, kWidth>*>(codes)[at] = packed;
    }
  }
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

__device__ std::uint16_t scale_at(const Decoding& decoding, const std::byte* wire,
                                  std::int64_t block) {
  return reinterpret_cast<const std::uint16_t*>(wire + decoding.scales_at)[block];
}

// No NaNs.
__device__ void narrow_two(const float* sums, float* out) {
  out[0] = sums[0];
  out[1] = sums[1];
}
__device__ void narrow_two(const float* sums, BFloat16* out) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(sums[0], sums[1]);
  out[0].bits = __bfloat16_as_ushort(two.x);
  out[1].bits = __bfloat16_as_ushort(two.y);
}
__device__ void narrow_two(const float* sums, Float16* out) {
  const __half2 two = __floats2half2_rn(sums[0], sums[1]);
  out[0].bits = __half_as_ushort(two.x);
  out[1].bits = __half_as_ushort(two.y);
}

// One vector, value by value, for every scale.
template <int kBits, typename Value>
__device__ void decode_any(const Decoding& decoding, const std::byte* wires, Value* sum,
                           std::int64_t begin) {
  const std::int64_t whole_end = begin + kVector<Value>;
  const std::int64_t end = whole_end < decoding.numel ? whole_end : decoding.numel;
  const std::int64_t block = decoding.blocks.of(begin);
#pragma unroll 1
  for (std::int64_t i = begin; i < end; ++i) {
    float total = 0;
#pragma unroll 1
    for (int number = 0; number < decoding.num_wires; ++number) {
      const std::byte* const wire = wires + static_cast<std::size_t>(number) * decoding.stride;
      total += decoded<Value>(code_at<kBits>(wire, i), scale_at(decoding, wire, block));
    }
    narrow(with_canonical_nan(total), sum[i]);
  }
}

// kVectors vectors from `first` on, a CUDA block's threads apart, kWires wires at a time; the last
// piece is not whole.
template <int kBits, int kVectors, int kWires, bool kIsWhole, typename Value>
__device__ void decode_piece(const Decoding& decoding, const std::byte* __restrict__ wires,
                             Value* __restrict__ sum, std::int64_t first) {
  constexpr int kWidth = kVector<Value>;
  using Packed = Codes<kBits, kWidth>;
  const auto is_there = [&](int u) {
    return kIsWhole || (first + u * kThreads) * kWidth < decoding.numel;
  };
  float sums[kVectors][kWidth] = {};
  unsigned unusual = 0;  // a bit for each vector that is to be decoded by itself
  std::int64_t blocks[kVectors];
  const Place begin = decoding.blocks.place_of((first - threadIdx.x) * kWidth);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    blocks[u] = decoding.blocks.behind(
        begin, threadIdx.x / (kRow / kWidth) + static_cast<unsigned>(u * kThreads * kWidth / kRow));
  }
#pragma unroll 1
  for (int number = 0; number < (kWires == 1 ? 1 : decoding.num_wires); number += kWires) {
    Packed codes[kWires][kVectors] = {};
    std::uint16_t scales[kWires][kVectors] = {};
#pragma unroll
    for (int w = 0; w < kWires; ++w) {
      // Behind the last wire it is read once more, for nothing, so that no load depends on a
      // choice.
      const int last = decoding.num_wires - 1;
      const int own = kWires == 1 || number + w < last ? number + w : last;
      const std::byte* const wire = wires + static_cast<std::size_t>(own) * decoding.stride;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (is_there(u)) {
          codes[w][u] = reinterpret_cast<const Packed*>(wire)[first + u * kThreads];
          scales[w][u] = scale_at(decoding, wire, blocks[u]);
        }
      }
    }
#pragma unroll
    for (int w = 0; w < kWires; ++w) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        unusual |= is_plain<kBits, Value>(scales[w][u]) ? 0U : 1U << u;
        const bool counts = w == 0 || number + w < decoding.num_wires;
        const float scale = counts ? widened_scale(scales[w][u]) : 0.0F;  // no sum is -0
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float code = code_in_fp32<kBits>(word_of<kBits>(codes[w][u], k),
                                                 k % kCodesOfWord<kBits>, decoding.code_base);
          // The product is exact, so fusing changes nothing.
          sums[u][k] = kWires == 1 ? code * scale : __fmaf_rn(code, scale, sums[u][k]);
        }
      }
    }
  }
  // Unusual vectors, too: they are overwritten. A load that only some stores need would wait for
  // the choice between them.
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (is_there(u)) {
      Several<Value, kWidth> out;
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) {
        narrow_two(&sums[u][k], &out.values[k]);
      }
      const std::int64_t at = first + u * kThreads;
      if (kIsWhole) {
        reinterpret_cast<Several<Value, kWidth>*>(sum)[at] = out;
      } else {
        store(sum, at * kWidth, decoding.numel, decoding.is_aligned, out);
      }
    }
  }
  if (unusual != 0) {
#pragma unroll 1
    for (int u = 0; u < kVectors; ++u) {
      if (is_there(u) && (unusual >> u & 1U) != 0) {
        decode_any<kBits>(decoding, wires, sum, (first + u * kThreads) * kWidth);
      }
    }
  }
}

// The sum of wires, a piece for each CUDA block. kWires = 1: there is one wire.
template <int kBits, typename Value, int kVectors, int kWires>
__global__ void __launch_bounds__(kThreads, kWires == 1          ? 5
                                            : sizeof(Value) == 4 ? 3
                                                                 : 4)
    decode_pieces(const __grid_constant__ Decoding decoding, const std::byte* __restrict__ wires,
                  Value* __restrict__ sum) {
  constexpr std::int64_t kPiece = std::int64_t{kThreads} * kVectors;
  const std::int64_t begin = blockIdx.x * kPiece;
  const std::int64_t first = begin + threadIdx.x;
  if (decoding.is_aligned && (begin + kPiece) * kVector<Value> <= decoding.numel) {
    decode_piece<kBits, kVectors, kWires, true>(decoding, wires, sum, first);
  } else {
    decode_piece<kBits, kVectors, kWires, false>(decoding, wires, sum, first);
  }
}

// Lanes of one thread: a group of kGroup threads has a chunk at a time, a row of lanes in each
// step, and the scales of kScaledRows rows are one where blocks are that long.
constexpr int kLanes = 4;
static_assert(kMeasureLanes == kRow);
constexpr int kGroup = kMeasureLanes / kLanes;
constexpr int kGroups = kThreads / kGroup;  // of a CUDA block
constexpr int kScaledRows = 4;
template <typename Value>
inline constexpr int kRowsAhead = sizeof(Value) == 4 ? 4 : 8;
static_assert(kWarp % kGroup == 0 && kMeasureSlots % kGroups == 0);
static_assert(kMeasureChunk % (kMeasureLanes * 8) == 0);

__device__ double total_of(double (&lanes)[kLanes]) {
#pragma unroll
  for (int half = kGroup / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      lanes[k] += __shfl_down_sync(kAllLanes, lanes[k], half, kGroup);
    }
  }
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) {
      lanes[k] += lanes[k + half];
    }
  }
  return lanes[0];
}

struct LaneSums {
  double errors[kLanes] = {};
  double squares[kLanes] = {};
};

// For every scale.
template <typename Value>
__device__ void add_any(Value loaded, int code, std::uint16_t scale, double& errors,
                        double& squares) {
  const auto value = static_cast<double>(as_fp32(loaded));
  const double error = static_cast<double>(decoded<Value>(code, scale)) - value;
  errors += error * error;
  squares += value * value;
}

// A chunk of which a part is there, or from an address that is not aligned, value by value.
template <int kBits, typename Value>
__device__ void add_part(const Decoding& decoding, const Value* __restrict__ values,
                         const std::byte* __restrict__ wire, std::int64_t begin, LaneSums& sums) {
  const std::int64_t chunk_end = begin + kMeasureChunk;
  const std::int64_t end = chunk_end < decoding.numel ? chunk_end : decoding.numel;
#pragma unroll 1
  for (std::int64_t i = begin; i < end; i += kMeasureLanes) {
    const std::uint16_t scale = scale_at(decoding, wire, decoding.blocks.of(i));
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      if (i + k < end) {
        add_any(values[i + k], code_at<kBits>(wire, i + k), scale, sums.errors[k], sums.squares[k]);
      }
    }
  }
}

// A whole chunk, from the first of this thread's values on. Codes and squares are exact in fp64, so
// fusing their products changes nothing: an error and a square are rounded once, like the
// reference's difference and its sum.
template <int kBits, bool kIsLong, typename Value>
__device__ void add_chunk(const Decoding& decoding, const Value* __restrict__ values,
                          const std::byte* __restrict__ wire, std::int64_t begin, LaneSums& sums) {
  using Packed = Codes<kBits, kLanes>;
  constexpr int kRows = kRowsAhead<Value>;
  constexpr int kRowsOfScale = kIsLong ? kScaledRows : 1;
  const Place first = decoding.blocks.place_of(begin);
#pragma unroll 1
  for (int row = 0; row < kMeasureChunk / kMeasureLanes; row += kRows) {
    const std::int64_t i = begin + row * kMeasureLanes;
    Several<Value, kLanes> loaded[kRows];
    Packed codes[kRows];
    std::uint16_t scales[kRows / kRowsOfScale];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      loaded[u] = *reinterpret_cast<const Several<Value, kLanes>*>(values + i + u * kMeasureLanes);
      codes[u] = reinterpret_cast<const Packed*>(wire)[i / kLanes + u * kGroup];
    }
    bool are_plain = true;
#pragma unroll
    for (int u = 0; u < kRows; u += kRowsOfScale) {
      std::uint16_t& scale = scales[u / kRowsOfScale];
      scale = scale_at(decoding, wire,
                       decoding.blocks.behind(first, static_cast<std::uint32_t>(row + u)));
      are_plain = are_plain && is_plain<kBits, Value>(scale);
    }
    // Both ways use what was loaded, which keeps loads in front of a choice that waits for scales.
    if (are_plain) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const auto scale = static_cast<double>(widened_scale(scales[u / kRowsOfScale]));
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          const auto value = static_cast<double>(as_fp32(loaded[u].values[k]));
          const double error = __fma_rn(code_in_fp64<kBits>(codes[u], k), scale, -value);
          sums.errors[k] += error * error;
          sums.squares[k] = __fma_rn(value, value, sums.squares[k]);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          const auto code = static_cast<int>(code_in_fp32<kBits>(codes[u], k, kCodeBase));
          add_any(loaded[u].values[k], code, scales[u / kRowsOfScale], sums.errors[k],
                  sums.squares[k]);
        }
      }
    }
  }
}

// Four CUDA blocks on a processor, so that a large GPU has all slots under way at once.
template <int kBits, bool kIsLong, typename Value>
__global__ void __launch_bounds__(kThreads, 4)
    sum_chunks(const __grid_constant__ Decoding decoding, const Value* __restrict__ values,
               const std::byte* __restrict__ wire, double* __restrict__ slots) {
  const std::int64_t num_chunks = (decoding.numel + kMeasureChunk - 1) / kMeasureChunk;
  const int member = static_cast<int>(threadIdx.x) % kGroup;
  const std::int64_t slot =
      static_cast<std::int64_t>(blockIdx.x) * kGroups + static_cast<int>(threadIdx.x) / kGroup;
  const std::int64_t first_slot = slot - static_cast<int>(threadIdx.x % kWarp) / kGroup;
  double totals[2] = {};
  // Groups behind the last chunk add zeros: the shuffles need the whole warp.
  for (std::int64_t turn = 0; first_slot + turn < num_chunks; turn += kMeasureSlots) {
    LaneSums sums;
    const std::int64_t chunk = slot + turn;
    const std::int64_t begin = chunk * kMeasureChunk + member * kLanes;
    if (decoding.is_aligned && (chunk + 1) * kMeasureChunk <= decoding.numel) {
      add_chunk<kBits, kIsLong>(decoding, values, wire, begin, sums);
    } else {
      add_part<kBits>(decoding, values, wire, begin, sums);
    }
    __syncwarp();
    totals[0] += total_of(sums.errors);
    totals[1] += total_of(sums.squares);
  }
  if (member == 0 && slot < num_chunks) {
    slots[2 * slot] = totals[0];
    slots[2 * slot + 1] = totals[1];
  }
}

constexpr int kSlotThreads = 1024;
constexpr int kSlotsPerThread = kMeasureSlots / kSlotThreads;

// One CUDA block. Both sums at once: a slot is one access.
__global__ void __launch_bounds__(kSlotThreads)
    sum_slots(const double* __restrict__ slots, std::int64_t num_slots, double* result,
              bool continues) {
  __shared__ double2 tile[kSlotThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const auto at = [&](int j) {
    const int slot = j * kSlotThreads + thread;
    return slot < num_slots ? reinterpret_cast<const double2*>(slots)[slot] : double2{0, 0};
  };
  const auto add = [](double2& sum, const double2& term) {
    sum.x += term.x;
    sum.y += term.y;
  };
  double2 own[kSlotsPerThread / 2];
#pragma unroll
  for (int j = 0; j < kSlotsPerThread / 2; ++j) {
    own[j] = at(j);
    add(own[j], at(j + kSlotsPerThread / 2));
  }
#pragma unroll
  for (int half = kSlotsPerThread / 4; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) {
      add(own[j], own[j + half]);
    }
  }
  tile[thread] = own[0];
  __syncthreads();
  for (int half = kSlotThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      add(tile[thread], tile[thread + half]);
    }
    __syncthreads();
  }
  if (thread == 0) {
    result[0] = (continues ? result[0] : 0) + tile[0].x;
    result[1] = (continues ? result[1] : 0) + tile[0].y;
  }
}

// CUDA blocks of kThreads that fill the current device, or fewer where that many threads suffice.
unsigned grid_for(std::int64_t num_threads) {
  int index = 0;
  int num_processors = 0;
  TESSERA_CUDA_CALL(cudaGetDevice, &index);
  TESSERA_CUDA_CALL(cudaDeviceGetAttribute, &num_processors, cudaDevAttrMultiProcessorCount, index);
  const std::int64_t most = static_cast<std::int64_t>(num_processors) * kBlocksPerProcessor;
  const std::int64_t enough = (num_threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(enough < most ? enough : most);
}

bool is_aligned_to(const void* data, std::size_t bytes) {
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

Decoding decoding_of(const BlockFormat& format, std::int64_t numel) {
  return {numel, wire_bytes(format, numel), code_bytes(format, numel),
          1,     blocks_of(format),         kCodeBase,
          false};
}

// CUDA blocks for `num` of what each of them has `of_block`.
unsigned grid_of(std::int64_t num, std::int64_t of_block) {
  return static_cast<unsigned>((num + of_block - 1) / of_block);
}

template <int kBits, typename Value, int kVectors, int kWires>
void launch_pieces(const Decoding& decoding, const std::byte* wires, Value* sum,
                   cudaStream_t stream) {
  const unsigned grid = grid_of(decoding.numel, std::int64_t{kThreads} * kVectors * kVector<Value>);
  decode_pieces<kBits, Value, kVectors, kWires>
      <<<grid, kThreads, 0, stream>>>(decoding, wires, sum);
}

template <int kBits, typename Value>
void launch_sum(Decoding decoding, const std::byte* wires, Value* sum, cudaStream_t stream) {
  constexpr int kOfSeveral = 16 / kVector<Value>;  // 16 sums in registers
  decoding.is_aligned = is_aligned_to(sum, 16);
  if (decoding.num_wires == 1) {
    launch_pieces<kBits, Value, 4, 1>(decoding, wires, sum, stream);
  } else if (decoding.num_wires == 2) {
    launch_pieces<kBits, Value, kOfSeveral, 2>(decoding, wires, sum, stream);
  } else {
    launch_pieces<kBits, Value, kOfSeveral, 4>(decoding, wires, sum, stream);
  }
  device::check_cuda("decoding kernel", cudaGetLastError());
}

template <int kBits, typename Value>
void launch_chunks(const Decoding& decoding, const Value* values, const std::byte* wire,
                   double* slots, std::int64_t num_slots, cudaStream_t stream) {
  const unsigned grid = grid_of(num_slots, kGroups);
  if (decoding.blocks.numel % (kScaledRows * kMeasureLanes) == 0) {
    sum_chunks<kBits, true><<<grid, kThreads, 0, stream>>>(decoding, values, wire, slots);
  } else {
    sum_chunks<kBits, false><<<grid, kThreads, 0, stream>>>(decoding, values, wire, slots);
  }
  device::check_cuda("measuring kernel", cudaGetLastError());
}

}  // namespace

void launch_encode(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                   std::byte* wire, cudaStream_t stream) {
  with_type(format, dtype, [&](auto type, auto bits) {
    using Value = typename decltype(type)::type;
    constexpr int kBits = decltype(bits)::value;
    const std::size_t scales_at = code_bytes(format, numel);
    const auto vectors = static_cast<unsigned>(format.block_numel) / kVector<Value>;
    Encoding encoding{};
    encoding.numel = numel;
    encoding.blocks = blocks_of(format);
    encoding.num_blocks = num_blocks(format, numel);
    encoding.coded_numel = static_cast<std::int64_t>(scales_at) * 8 / kBits;
    encoding.scaled_blocks =
        static_cast<std::int64_t>((wire_bytes(format, numel) - scales_at) / sizeof(std::uint16_t));
    encoding.team = static_cast<int>(vectors < kWarp ? std::bit_floor(vectors) : kWarp);
    encoding.team_vectors = static_cast<int>(vectors) / encoding.team;
    encoding.is_aligned = is_aligned_to(values, 16);
    const auto* const from = static_cast<const Value*>(values);
    auto* const scales = reinterpret_cast<std::uint16_t*>(wire + scales_at);
    if (encoding.is_aligned && encoding.blocks.shift >= 0 && encoding.team_vectors <= kAhead) {
      constexpr std::int64_t kOfBlock = std::int64_t{kThreads} * kAhead * kVector<Value>;
      encode_pieces<kBits, Value>
          <<<grid_of(numel, kOfBlock), kThreads, 0, stream>>>(encoding, from, wire, scales);
    } else {
      encode_blocks<kBits, Value>
          <<<grid_for(encoding.num_blocks * encoding.team), kThreads, 0, stream>>>(encoding, from,
                                                                                   wire, scales);
    }
    device::check_cuda("encoding kernel", cudaGetLastError());
  });
}

void launch_decode(const BlockFormat& format, const std::byte* wire, std::int64_t numel,
                   void* values, DType dtype, cudaStream_t stream) {
  launch_decode_sum(format, wire, wire_bytes(format, numel), 1, numel, values, dtype, stream);
}

void launch_decode_sum(const BlockFormat& format, const std::byte* wires, std::size_t stride,
                       int num_wires, std::int64_t numel, void* sum, DType dtype,
                       cudaStream_t stream) {
  Decoding decoding = decoding_of(format, numel);
  decoding.stride = stride;
  decoding.num_wires = num_wires;
  with_type(format, dtype, [&](auto type, auto bits) {
    using Value = typename decltype(type)::type;
    launch_sum<decltype(bits)::value>(decoding, wires, static_cast<Value*>(sum), stream);
  });
}

void launch_measure(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                    const std::byte* wire, double* slots, double* result, bool continues,
                    cudaStream_t stream) {
  const std::int64_t num_chunks = (numel + kMeasureChunk - 1) / kMeasureChunk;
  const std::int64_t num_slots = num_chunks < kMeasureSlots ? num_chunks : kMeasureSlots;
  if (num_slots > 0) {
    with_type(format, dtype, [&](auto type, auto bits) {
      using Value = typename decltype(type)::type;
      Decoding decoding = decoding_of(format, numel);
      decoding.is_aligned = is_aligned_to(values, kLanes * sizeof(Value));
      launch_chunks<decltype(bits)::value>(decoding, static_cast<const Value*>(values), wire, slots,
                                           num_slots, stream);
    });
  }
  sum_slots<<<1, kSlotThreads, 0, stream>>>(slots, num_slots, result, continues);
  device::check_cuda("sum of slots kernel", cudaGetLastError());
}

}  // namespace tessera::quant::cuda
