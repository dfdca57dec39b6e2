// Values to blocks: each has a scale from its largest magnitude, and codes.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tessera/device/cuda_call.h"
#include "tessera/quant/cuda_blocks.cuh"

namespace tessera::quant::cuda {
namespace {

constexpr int kBlocksPerProcessor = 8;  // of a grid that goes round

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

}  // namespace tessera::quant::cuda
