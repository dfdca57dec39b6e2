// Blocks of integers on an NVIDIA GPU. Scales and codes are those of block_rules.cuh, so the bytes
// are the host's: nothing is fused (-fmad=false), divisions are IEEE's, subnormal numbers stay.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_convert.cuh"
#include "tessera/quant/block_rules.cuh"
#include "tessera/quant/cuda_launch.h"

namespace tessera::quant::cuda {
namespace {

using device::cuda::narrow;
using device::cuda::widened;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kBlocksPerProcessor = 8;

// Values of one access of 16 bytes, and their codes as one word: code k from bit k * kBits on.
template <typename Value>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(Value));

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = std::uint16_t;
};
template <>
struct WordOf<4> {
  using Type = std::uint32_t;
};
template <>
struct WordOf<8> {
  using Type = std::uint64_t;
};
template <int kBits, int kWidth>
using Word = typename WordOf<kBits * kWidth / 8>::Type;

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

template <int kBits, typename Codes>
__device__ int code_in(Codes word, int k) {
  const auto bits = static_cast<std::uint32_t>(word >> (k * kBits));
  return kBits == 8 ? static_cast<int>(static_cast<std::int8_t>(bits & 0xffU))
                    : signed_nibble(bits);
}

// What is in a block: a power of two is worth a shift.
struct Blocks {
  std::int64_t numel;
  int shift;  // -1: none

  __device__ std::int64_t of(std::int64_t i) const { return shift >= 0 ? i >> shift : i / numel; }
};

Blocks blocks_of(const BlockFormat& format) {
  const auto numel = static_cast<std::uint64_t>(format.block_numel);
  return {format.block_numel, std::has_single_bit(numel) ? std::countr_zero(numel) : -1};
}

struct Encoding {
  std::int64_t numel;
  std::int64_t block_numel;
  std::int64_t num_blocks;
  std::int64_t coded_numel;    // with those that pad the codes
  std::int64_t scaled_blocks;  // with those that pad the scales
  int team;                    // threads of one block: a power of two, at most a warp
  bool is_aligned;
};

template <int kWidth, typename Value>
__device__ std::uint32_t absmax_of(const Several<Value, kWidth>& several) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const std::uint32_t bits = bits_of(widened(several.values[k])) & 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <int kBits, int kWidth, typename Value>
__device__ Word<kBits, kWidth> word_of(const Several<Value, kWidth>& several, float inverse) {
  using Codes = Word<kBits, kWidth>;
  Codes word = 0;
  if (inverse != 0.0F) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const std::uint32_t code =
          code_of(widened(several.values[k]), inverse) & ((1U << kBits) - 1U);
      word = static_cast<Codes>(word | static_cast<Codes>(static_cast<Codes>(code) << (k * kBits)));
    }
  }
  return word;
}

// A team of threads has a block at a time, and each of them every team-th vector of it: the first
// one stays in registers, which is all there is in blocks of 128, and others are read twice.
template <int kBits, typename Value>
__global__ void __launch_bounds__(kThreads)
    encode_blocks(const __grid_constant__ Encoding encoding, const Value* __restrict__ values,
                  std::byte* __restrict__ codes, std::uint16_t* __restrict__ scales) {
  constexpr int kWidth = kVector<Value>;
  using Codes = Word<kBits, kWidth>;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const int lane = static_cast<int>(threadIdx.x) % encoding.team;
  const int step = encoding.team * kWidth;
  if (thread < encoding.scaled_blocks - encoding.num_blocks) {
    scales[encoding.num_blocks + thread] = 0;
  }
  // Teams behind the last block take part with nothing: the shuffle needs the whole warp.
  const std::int64_t warp = (thread - threadIdx.x % kWarp) / encoding.team;
  const std::int64_t team_in_warp = threadIdx.x % kWarp / static_cast<unsigned>(encoding.team);
  for (std::int64_t first = warp; first < encoding.num_blocks;
       first += num_threads / encoding.team) {
    const std::int64_t block = first + team_in_warp;
    const std::int64_t begin = block * encoding.block_numel;
    const std::int64_t block_end = begin + encoding.block_numel;
    const std::int64_t end = block_end < encoding.numel ? block_end : encoding.numel;
    const std::int64_t own = begin + lane * kWidth;
    const auto kept = load<kWidth>(values, own, end, encoding.is_aligned);
    std::uint32_t absmax = absmax_of(kept);
    for (std::int64_t i = own + step; i < end; i += step) {
      const std::uint32_t further = absmax_of(load<kWidth>(values, i, end, encoding.is_aligned));
      absmax = further > absmax ? further : absmax;
    }
    for (int half = encoding.team / 2; half > 0; half /= 2) {
      const std::uint32_t other = __shfl_xor_sync(0xffffffffU, absmax, half);
      absmax = other > absmax ? other : absmax;
    }
    const std::uint16_t scale = scale_for<kBits>(absmax);
    const float inverse = inverse_scale(scale);
    const std::int64_t coded_end =
        block_end < encoding.coded_numel ? block_end : encoding.coded_numel;
    if (own < coded_end) {
      reinterpret_cast<Codes*>(codes)[own / kWidth] = word_of<kBits>(kept, inverse);
    }
    for (std::int64_t i = own + step; i < coded_end; i += step) {
      reinterpret_cast<Codes*>(codes)[i / kWidth] =
          word_of<kBits>(load<kWidth>(values, i, end, encoding.is_aligned), inverse);
    }
    if (lane == 0 && block < encoding.num_blocks) {
      scales[block] = scale;
    }
  }
}

struct Decoding {
  std::int64_t numel;
  std::size_t stride;     // between wires
  std::size_t scales_at;  // in each
  int num_wires;
  Blocks blocks;
  bool is_aligned;
};

// The sum of wires, each thread a vector at a time. kVectors vectors of kAhead wires are under way,
// so that reads do not wait for one another. kAhead = 1: there is one wire.
template <int kBits, typename Value, int kVectors, int kAhead>
__global__ void __launch_bounds__(kThreads)
    decode_blocks(const __grid_constant__ Decoding decoding, const std::byte* __restrict__ wires,
                  Value* __restrict__ sum) {
  constexpr int kWidth = kVector<Value>;
  using Codes = Word<kBits, kWidth>;
  const std::int64_t num_vectors = (decoding.numel + kWidth - 1) / kWidth;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (std::int64_t first = thread; first < num_vectors; first += num_threads * kVectors) {
    float sums[kVectors][kWidth] = {};
    std::int64_t at[kVectors];      // of the vector
    std::int64_t blocks[kVectors];  // of its block
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      // Behind the end the first vector stands in, and is not stored.
      at[u] = first + u * num_threads < num_vectors ? first + u * num_threads : first;
      blocks[u] = decoding.blocks.of(at[u] * kWidth);
    }
#pragma unroll kAhead
    for (int number = 0; number < (kAhead == 1 ? 1 : decoding.num_wires); ++number) {
      const std::byte* const wire = wires + static_cast<std::size_t>(number) * decoding.stride;
      const auto* const scales = reinterpret_cast<const std::uint16_t*>(wire + decoding.scales_at);
      Codes words[kVectors];
      std::uint16_t found[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        words[u] = reinterpret_cast<const Codes*>(wire)[at[u]];
        found[u] = scales[blocks[u]];
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (is_plain<kBits, Value>(found[u])) {
          const float scale = widened_scale(found[u]);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            sums[u][k] += static_cast<float>(code_in<kBits>(words[u], k)) * scale;
          }
        } else {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            sums[u][k] += decoded<Value>(code_in<kBits>(words[u], k), found[u]);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (first + u * num_threads < num_vectors) {
        Several<Value, kWidth> out;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          narrow(with_canonical_nan(sums[u][k]), out.values[k]);
        }
        store(sum, at[u] * kWidth, decoding.numel, decoding.is_aligned, out);
      }
    }
  }
}

// Lanes of one thread: a group of kGroup threads has a chunk at a time, a row of lanes in each
// step.
constexpr int kLanes = 4;
constexpr int kGroup = kMeasureLanes / kLanes;
constexpr int kGroups = kThreads / kGroup;  // of a CUDA block
constexpr int kRowsAhead = 4;
static_assert(kWarp % kGroup == 0 && kMeasureSlots % kGroups == 0);
static_assert(kMeasureChunk % (kMeasureLanes * kRowsAhead) == 0);

__device__ double total_of(double (&lanes)[kLanes]) {
#pragma unroll
  for (int half = kGroup / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      lanes[k] += __shfl_down_sync(0xffffffffU, lanes[k], half, kGroup);
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

// Four CUDA blocks on a processor, so that a large GPU has all slots under way at once.
template <int kBits, typename Value>
__global__ void __launch_bounds__(kThreads, 4)
    sum_chunks(const __grid_constant__ Decoding decoding, const Value* __restrict__ values,
               const std::byte* __restrict__ wire, double* __restrict__ slots) {
  using Codes = Word<kBits, kLanes>;
  const auto* const scales = reinterpret_cast<const std::uint16_t*>(wire + decoding.scales_at);
  const std::int64_t num_chunks = (decoding.numel + kMeasureChunk - 1) / kMeasureChunk;
  const int member = static_cast<int>(threadIdx.x) % kGroup;
  const std::int64_t slot =
      static_cast<std::int64_t>(blockIdx.x) * kGroups + static_cast<int>(threadIdx.x) / kGroup;
  const std::int64_t first_slot = slot - static_cast<int>(threadIdx.x % kWarp) / kGroup;
  double sums[2] = {};
  // Groups behind the last chunk add zeros: the shuffles need the whole warp.
  for (std::int64_t turn = 0; first_slot + turn < num_chunks; turn += kMeasureSlots) {
    double errors[kLanes] = {};
    double squares[kLanes] = {};
    const std::int64_t begin = (slot + turn) * kMeasureChunk + member * kLanes;
    for (std::int64_t row = 0; row < kMeasureChunk && begin + row < decoding.numel;
         row += kMeasureLanes * kRowsAhead) {
      Several<Value, kLanes> loaded[kRowsAhead];
      Codes words[kRowsAhead];
      std::uint16_t found[kRowsAhead];
#pragma unroll
      for (int u = 0; u < kRowsAhead; ++u) {
        const std::int64_t i = begin + row + u * kMeasureLanes;
        if (i < decoding.numel) {
          loaded[u] = load<kLanes>(values, i, decoding.numel, decoding.is_aligned);
          words[u] = reinterpret_cast<const Codes*>(wire)[i / kLanes];
          found[u] = scales[decoding.blocks.of(i)];
        }
      }
#pragma unroll
      for (int u = 0; u < kRowsAhead; ++u) {
        const std::int64_t i = begin + row + u * kMeasureLanes;
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (i + k < decoding.numel) {
            const auto value = static_cast<double>(widened(loaded[u].values[k]));
            const double error =
                static_cast<double>(decoded<Value>(code_in<kBits>(words[u], k), found[u])) - value;
            errors[k] += error * error;
            squares[k] += value * value;
          }
        }
      }
    }
    __syncwarp();
    sums[0] += total_of(errors);
    sums[1] += total_of(squares);
  }
  if (member == 0 && slot < num_chunks) {
    slots[2 * slot] = sums[0];
    slots[2 * slot + 1] = sums[1];
  }
}

constexpr int kSlotThreads = 1024;
constexpr int kSlotsPerThread = kMeasureSlots / kSlotThreads;

// One CUDA block.
__global__ void __launch_bounds__(kSlotThreads)
    sum_slots(const double* __restrict__ slots, std::int64_t num_slots, double* result,
              bool continues) {
  __shared__ double tile[kSlotThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (int kind = 0; kind < 2; ++kind) {
    double own[kSlotsPerThread];
#pragma unroll
    for (int j = 0; j < kSlotsPerThread; ++j) {
      const int slot = j * kSlotThreads + thread;
      own[j] = slot < num_slots ? slots[2 * slot + kind] : 0;
    }
#pragma unroll
    for (int half = kSlotsPerThread / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) {
        own[j] += own[j + half];
      }
    }
    tile[thread] = own[0];
    __syncthreads();
    for (int half = kSlotThreads / 2; half > 0; half /= 2) {
      if (thread < half) {
        tile[thread] += tile[thread + half];
      }
      __syncthreads();
    }
    if (thread == 0) {
      result[kind] = (continues ? result[kind] : 0) + tile[0];
    }
    __syncthreads();
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
  return {numel, wire_bytes(format, numel), code_bytes(format, numel), 1, blocks_of(format), false};
}

template <int kBits, typename Value>
void launch_sum(Decoding decoding, const std::byte* wires, Value* sum, cudaStream_t stream) {
  constexpr int kWidth = kVector<Value>;
  constexpr int kOfOne = 4;
  constexpr int kOfSeveral = 2;  // times the wires that are read ahead
  const std::int64_t num_vectors = (decoding.numel + kWidth - 1) / kWidth;
  decoding.is_aligned = is_aligned_to(sum, 16);
  if (decoding.num_wires == 1) {
    decode_blocks<kBits, Value, kOfOne, 1>
        <<<grid_for((num_vectors + kOfOne - 1) / kOfOne), kThreads, 0, stream>>>(decoding, wires,
                                                                                 sum);
  } else {
    decode_blocks<kBits, Value, kOfSeveral, 4>
        <<<grid_for((num_vectors + kOfSeveral - 1) / kOfSeveral), kThreads, 0, stream>>>(
            decoding, wires, sum);
  }
  device::check_cuda("decoding kernel", cudaGetLastError());
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
    encoding.block_numel = format.block_numel;
    encoding.num_blocks = num_blocks(format, numel);
    encoding.coded_numel = static_cast<std::int64_t>(scales_at) * 8 / kBits;
    encoding.scaled_blocks =
        static_cast<std::int64_t>((wire_bytes(format, numel) - scales_at) / sizeof(std::uint16_t));
    encoding.team = static_cast<int>(vectors < kWarp ? std::bit_floor(vectors) : kWarp);
    encoding.is_aligned = is_aligned_to(values, 16);
    encode_blocks<kBits, Value>
        <<<grid_for(encoding.num_blocks * encoding.team), kThreads, 0, stream>>>(
            encoding, static_cast<const Value*>(values), wire,
            reinterpret_cast<std::uint16_t*>(wire + scales_at));
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
      const auto grid = static_cast<unsigned>((num_slots + kGroups - 1) / kGroups);
      sum_chunks<decltype(bits)::value, Value>
          <<<grid, kThreads, 0, stream>>>(decoding, static_cast<const Value*>(values), wire, slots);
      device::check_cuda("measuring kernel", cudaGetLastError());
    });
  }
  sum_slots<<<1, kSlotThreads, 0, stream>>>(slots, num_slots, result, continues);
  device::check_cuda("sum of slots kernel", cudaGetLastError());
}

}  // namespace tessera::quant::cuda
