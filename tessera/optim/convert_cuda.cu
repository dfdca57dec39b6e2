// Sums and conversions of elements on an NVIDIA GPU.
#include <cstddef>

#include "tessera/optim/cuda_elements.cuh"
#include "tessera/optim/cuda_launch.h"

namespace tessera::optim::cuda {
namespace {

constexpr int kBlocksPerProcessor = 8;

// Calls of `one(i)` for elements alone and of `four(i)` for those from i to i + kWidth, over all
// threads of the grid; see head_numel().
template <typename One, typename FourOf>
__device__ void for_elements(std::int64_t numel, std::int64_t head, const One& one,
                             const FourOf& four) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t num_fours = (numel - head) / kWidth;
  for (std::int64_t i = thread; i < num_fours; i += num_threads) {
    four(head + i * kWidth);
  }
  for (std::int64_t i = thread; i < head; i += num_threads) {
    one(i);
  }
  const std::int64_t tail = head + num_fours * kWidth;
  if (thread < numel - tail) {
    one(tail + thread);
  }
}

template <typename Value>
__global__ void __launch_bounds__(kThreads)
    add_elements(float* __restrict__ values, const Value* __restrict__ addend, std::int64_t numel,
                 std::int64_t head) {
  for_elements(
      numel, head, [&](std::int64_t i) { values[i] += widened(addend[i]); },
      [&](std::int64_t i) {
        const Four<Value> added = load_four(addend + i);
        Four<float> sums = load_four(values + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          sums.values[k] += widened(added.values[k]);
        }
        store_four(values + i, sums);
      });
}

// Bits of 16, whatever the elements they are half of.
__global__ void __launch_bounds__(kThreads)
    join_elements(float* __restrict__ to, const BFloat16* __restrict__ high,
                  const BFloat16* __restrict__ low, std::int64_t numel, std::int64_t head) {
  const auto joined = [](BFloat16 upper, BFloat16 lower) {
    return __uint_as_float(static_cast<unsigned>(upper.bits) << 16 | lower.bits);
  };
  for_elements(
      numel, head, [&](std::int64_t i) { to[i] = joined(high[i], low[i]); },
      [&](std::int64_t i) {
        const Four<BFloat16> upper = load_four(high + i);
        const Four<BFloat16> lower = load_four(low + i);
        Four<float> out;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          out.values[k] = joined(upper.values[k], lower.values[k]);
        }
        store_four(to + i, out);
      });
}

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads)
    convert_elements(To* __restrict__ to, const From* __restrict__ from, float scale,
                     std::int64_t numel, std::int64_t head) {
  const auto converted = [scale](From value, To& out) {
    const float wide = widened(value);
    narrow(scale == 1.0F ? wide : wide * scale, out);
  };
  for_elements(
      numel, head, [&](std::int64_t i) { converted(from[i], to[i]); },
      [&](std::int64_t i) {
        const Four<From> given = load_four(from + i);
        Four<To> out;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          converted(given.values[k], out.values[k]);
        }
        store_four(to + i, out);
      });
}

unsigned grid_for(std::int64_t numel) {
  constexpr std::int64_t kPart = static_cast<std::int64_t>(kThreads) * kWidth;
  return grid_of((numel + kPart - 1) / kPart, kBlocksPerProcessor);
}

template <typename Value>
void launch_add_of(float* values, const void* addend, std::int64_t numel, cudaStream_t stream) {
  const std::int64_t head = head_numel({{values, sizeof(float)}, {addend, sizeof(Value)}}, numel);
  add_elements<<<grid_for(numel), kThreads, 0, stream>>>(values, static_cast<const Value*>(addend),
                                                         numel, head);
  device::check_cuda("add kernel", cudaGetLastError());
}

template <typename To, typename From>
void launch_convert_of(void* to, const void* from, float scale, std::int64_t numel,
                       cudaStream_t stream) {
  const std::int64_t head = head_numel({{to, sizeof(To)}, {from, sizeof(From)}}, numel);
  convert_elements<<<grid_for(numel), kThreads, 0, stream>>>(
      static_cast<To*>(to), static_cast<const From*>(from), scale, numel, head);
  device::check_cuda("convert kernel", cudaGetLastError());
}

template <typename From>
void launch_convert_from(void* to, DType to_dtype, const void* from, float scale,
                         std::int64_t numel, cudaStream_t stream) {
  if (to_dtype == DType::kFloat32) {
    launch_convert_of<float, From>(to, from, scale, numel, stream);
  } else if (to_dtype == DType::kBFloat16) {
    launch_convert_of<BFloat16, From>(to, from, scale, numel, stream);
  } else {
    launch_convert_of<Float16, From>(to, from, scale, numel, stream);
  }
}

}  // namespace

void launch_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                cudaStream_t stream) {
  if (dtype == DType::kFloat32) {
    launch_add_of<float>(values, addend, numel, stream);
  } else if (dtype == DType::kBFloat16) {
    launch_add_of<BFloat16>(values, addend, numel, stream);
  } else {
    launch_add_of<Float16>(values, addend, numel, stream);
  }
}

void launch_join(float* to, const void* high, const void* low, std::int64_t numel,
                 cudaStream_t stream) {
  const std::int64_t head =
      head_numel({{to, sizeof(float)}, {high, sizeof(BFloat16)}, {low, sizeof(BFloat16)}}, numel);
  join_elements<<<grid_for(numel), kThreads, 0, stream>>>(
      to, static_cast<const BFloat16*>(high), static_cast<const BFloat16*>(low), numel, head);
  device::check_cuda("join kernel", cudaGetLastError());
}

void launch_convert(void* to, DType to_dtype, const void* from, DType from_dtype, float scale,
                    std::int64_t numel, cudaStream_t stream) {
  if (to_dtype == from_dtype && scale == 1.0F) {
    TESSERA_CUDA_CALL(cudaMemcpyAsync, to, from,
                      static_cast<std::size_t>(numel) * bytes_of(to_dtype), cudaMemcpyDefault,
                      stream);
  } else if (from_dtype == DType::kFloat32) {
    launch_convert_from<float>(to, to_dtype, from, scale, numel, stream);
  } else if (from_dtype == DType::kBFloat16) {
    launch_convert_from<BFloat16>(to, to_dtype, from, scale, numel, stream);
  } else {
    launch_convert_from<Float16>(to, to_dtype, from, scale, numel, stream);
  }
}

}  // namespace tessera::optim::cuda
