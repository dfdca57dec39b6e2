// The sums of squares of values and of their errors as blocks, in the order of block_codec.h.
#include <cstddef>
#include <cstdint>

#include "tessera/device/cuda_call.h"
#include "tessera/quant/cuda_blocks.cuh"

namespace tessera::quant::cuda {
namespace {

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
