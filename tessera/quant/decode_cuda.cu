// Blocks to values, and sums of the values of several wires.
#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tessera/device/cuda_call.h"
#include "tessera/quant/cuda_blocks.cuh"

namespace tessera::quant::cuda {
namespace {

using device::cuda::narrow;

// The word of code k.
template <int kBits, typename Packed>
__device__ std::uint32_t word_of(Packed codes, int k) {
  if constexpr (sizeof(Packed) == 8) {
    return static_cast<std::uint32_t>(codes >> (k / kCodesOfWord<kBits> * kWordBits));
  } else {
    return codes;
  }
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

}  // namespace

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

}  // namespace tessera::quant::cuda
