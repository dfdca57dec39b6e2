// Sums of the ranks' parts, element by element in rank order. Element types and rules are those of
// exact_sum.cpp, so the bits are, too: nothing is fused (-fmad=false), subnormal numbers stay.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "tessera/comm/combine.cuh"
#include "tessera/comm/rank_sum_cuda.h"
#include "tessera/core/error.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_convert.cuh"

namespace tessera::comm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;
constexpr std::size_t kVectorBytes = 16;

// By rank.
struct Parts {
  const void* data[kMaxSummedRanks];
  int num = 0;
};

template <typename Stored>
inline constexpr bool kIsHalf = sizeof(Stored) == 2;

template <typename Stored>
__device__ auto widen(Stored value) {
  if constexpr (kIsHalf<Stored>) {
    return device::cuda::widened(value);
  } else {
    return value;
  }
}

template <typename Out, typename Wide>
__device__ Out narrowed(Wide value) {
  if constexpr (kIsHalf<Out>) {
    Out out;
    device::cuda::narrow(value, out);
    return out;
  } else {
    return static_cast<Out>(value);
  }
}

// kWidth elements in accesses of at most 16 bytes.
template <typename Value, int kWidth>
struct alignas(kWidth * sizeof(Value) < kVectorBytes ? kWidth * sizeof(Value)
                                                     : kVectorBytes) Several {
  Value values[kWidth];
};

// Groups of kWidth elements. `out` may be a part: a thread reads before it writes.
template <typename Stored, typename Out, int kWidth, typename Combine>
__global__ void __launch_bounds__(kThreads)
    reduce_parts(const __grid_constant__ Parts parts, Out* out, std::int64_t num_groups,
                 Combine combine) {
  using In = Several<Stored, kWidth>;
  using Wide = decltype(widen(Stored{}));
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < num_groups; i += num_threads) {
    const In first = static_cast<const In*>(parts.data[0])[i];
    Wide sums[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sums[k] = widen(first.values[k]);
    }
    for (int rank = 1; rank < parts.num; ++rank) {
      const In next = static_cast<const In*>(parts.data[rank])[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[k] = combine(sums[k], static_cast<Wide>(widen(next.values[k])));
      }
    }
    Several<Out, kWidth> result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      result.values[k] = narrowed<Out>(sums[k]);
    }
    reinterpret_cast<Several<Out, kWidth>*>(out)[i] = result;
  }
}

unsigned grid_for(std::int64_t num_groups) {
  int index = 0;
  int num_processors = 0;
  TESSERA_CUDA_CALL(cudaGetDevice, &index);
  TESSERA_CUDA_CALL(cudaDeviceGetAttribute, &num_processors, cudaDevAttrMultiProcessorCount, index);
  const std::int64_t most = static_cast<std::int64_t>(num_processors) * kBlocksPerProcessor;
  return static_cast<unsigned>(std::min((num_groups + kThreads - 1) / kThreads, most));
}

template <typename Stored, typename Out, int kWidth, typename Combine>
void launch_groups(const Parts& parts, void* out, std::int64_t num_groups, Combine combine,
                   cudaStream_t stream) {
  if (num_groups > 0) {
    reduce_parts<Stored, Out, kWidth><<<grid_for(num_groups), kThreads, 0, stream>>>(
        parts, static_cast<Out*>(out), num_groups, combine);
    device::check_cuda("rank sum kernel", cudaGetLastError());
  }
}

// Vectors where all memory is aligned for them, then what is left, or everything, one by one.
template <typename Stored, typename Out, typename Combine>
void launch(Parts parts, void* out, std::size_t numel, Combine combine, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(Stored);
  bool is_aligned = reinterpret_cast<std::uintptr_t>(out) % kVectorBytes == 0;
  for (int rank = 0; rank < parts.num; ++rank) {
    is_aligned &= reinterpret_cast<std::uintptr_t>(parts.data[rank]) % kVectorBytes == 0;
  }
  const std::size_t num_vectors = is_aligned ? numel / kWidth : 0;
  const std::size_t done = num_vectors * kWidth;
  launch_groups<Stored, Out, kWidth>(parts, out, static_cast<std::int64_t>(num_vectors), combine,
                                     stream);
  for (int rank = 0; rank < parts.num; ++rank) {
    parts.data[rank] = static_cast<const Stored*>(parts.data[rank]) + done;
  }
  launch_groups<Stored, Out, 1>(parts, static_cast<Out*>(out) + done,
                                static_cast<std::int64_t>(numel - done), combine, stream);
}

template <typename Stored, typename Out, int kWidth, typename Combine>
void load_groups() {
  cudaFuncAttributes attributes{};
  device::check_cuda(
      "cudaFuncGetAttributes",
      cudaFuncGetAttributes(&attributes, reduce_parts<Stored, Out, kWidth, Combine>));
}

// Does with the types of elements, and the rule of the reduction, what `Work` does.
template <typename Stored, typename Out, typename Work>
void with_rule(Reduction reduction, const Work& work) {
  switch (reduction) {
    case Reduction::kSum:
      return work.template operator()<Stored, Out>(Add{});
    case Reduction::kMax:
      return work.template operator()<Stored, Out>(Max{});
    case Reduction::kMin:
      return work.template operator()<Stored, Out>(Min{});
  }
}

template <typename Work>
void with_types(DType dtype, bool widens, Reduction reduction, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return with_rule<float, float>(reduction, work);
    case DType::kBFloat16:
      return widens ? with_rule<BFloat16, float>(reduction, work)
                    : with_rule<BFloat16, BFloat16>(reduction, work);
    case DType::kFloat16:
      return widens ? with_rule<Float16, float>(reduction, work)
                    : with_rule<Float16, Float16>(reduction, work);
    case DType::kFloat64:
      return with_rule<double, double>(reduction, work);
    case DType::kInt64:
      return with_rule<std::int64_t, std::int64_t>(reduction, work);
    case DType::kInt32:
      return with_rule<std::int32_t, std::int32_t>(reduction, work);
    case DType::kUInt8:
      return with_rule<std::uint8_t, std::uint8_t>(reduction, work);
  }
}

struct Launch {
  const Parts& parts;
  void* out = nullptr;
  std::size_t numel = 0;
  cudaStream_t stream = nullptr;

  template <typename Stored, typename Out, typename Combine>
  void operator()(Combine combine) const {
    launch<Stored, Out>(parts, out, numel, combine, stream);
  }
};

struct Load {
  template <typename Stored, typename Out, typename Combine>
  void operator()(Combine) const {
    load_groups<Stored, Out, kVectorBytes / sizeof(Stored), Combine>();
    load_groups<Stored, Out, 1, Combine>();
  }
};

}  // namespace

void load_rank_sums() {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64,
                            DType::kInt64, DType::kInt32, DType::kUInt8}) {
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
      with_types(dtype, false, reduction, Load{});
      with_types(dtype, true, reduction, Load{});
    }
  }
}

void launch_rank_sum(std::span<const std::byte* const> data, DType dtype, std::size_t numel,
                     void* out, DType out_dtype, Reduction reduction, cudaStream_t stream) {
  check_reduction(dtype, out_dtype);
  TESSERA_INVARIANT(data.size() <= kMaxSummedRanks, "a sum of ", data.size(), " ranks' parts");
  Parts parts;
  for (const std::byte* part : data) {
    parts.data[parts.num++] = part;
  }
  with_types(dtype, out_dtype != dtype, reduction, Launch{parts, out, numel, stream});
}

}  // namespace tessera::comm
