// Sums of squares on an NVIDIA GPU, by the blocks that kernels.h defines: one kernel sums each
// block of all spans, a second one adds the blocks of each span in order.
#include <cstddef>

#include "tessera/optim/cuda_elements.cuh"
#include "tessera/optim/cuda_launch.h"
#include "tessera/optim/step_rules.cuh"

namespace tessera::optim::cuda {
namespace {

// One group of kNormLanes threads per block of the norm; a warp holds whole groups.
constexpr int kGroups = kThreads / kNormLanes;
static_assert(32 % kNormLanes == 0 && kThreads % 32 == 0);
// Elements that a thread has under way. Their sum is one chain of additions, their loads are not.
constexpr int kUnroll = 16;
static_assert(kNormBlock % (kUnroll * kNormLanes) == 0);

struct Span {
  const void* values;
  std::int64_t numel;
  std::int64_t last_block;  // of all spans, counted from the first one's first; one behind
  DType dtype;
  bool continues;
};

// Spans are kernel parameters: no buffer to fill, to keep or to reuse. Few of them keep the launch
// light; many need what drivers have taken since CUDA 12.1.
constexpr int kFewSpans = 16;
#if CUDART_VERSION >= 12010
constexpr int kManySpans = 512;
#else
constexpr int kManySpans = 120;
#endif
template <int capacity>
struct Batch {
  Span spans[capacity];
  int num_spans;
};
static_assert(sizeof(Batch<kFewSpans>) <= 4096);

// The span that holds a block: the first that ends behind it.
template <int capacity>
__device__ int span_of(const Batch<capacity>& batch, std::int64_t block) {
  int begin = 0;
  int end = batch.num_spans - 1;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (block < batch.spans[middle].last_block) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

__device__ inline double with_square(double sum, float value) {
  const auto wide = static_cast<double>(value);
  return sum + wide * wide;
}

// What one lane adds of the block whose first element is values[0].
template <typename Value>
__device__ double lane_sum(const Value* __restrict__ values, std::int64_t numel, int lane) {
  double sum = 0;
  if (numel >= kNormBlock) {
    for (int begin = lane; begin < kNormBlock; begin += kUnroll * kNormLanes) {
      Value loaded[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        loaded[k] = values[begin + k * kNormLanes];
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        sum = with_square(sum, widened(loaded[k]));
      }
    }
    return sum;
  }
  for (int i = lane; i < static_cast<int>(numel); i += kNormLanes) {
    sum = with_square(sum, widened(values[i]));
  }
  return sum;
}

template <int capacity>
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const __grid_constant__ Batch<capacity> batch, double* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kNormLanes;
  const std::int64_t block =
      static_cast<std::int64_t>(blockIdx.x) * kGroups + static_cast<int>(threadIdx.x) / kNormLanes;
  const std::int64_t num_blocks = batch.spans[batch.num_spans - 1].last_block;
  double sum = 0;
  if (block < num_blocks) {
    const int at = span_of(batch, block);
    const Span& span = batch.spans[at];
    const std::int64_t begin =
        (block - (at == 0 ? 0 : batch.spans[at - 1].last_block)) * kNormBlock;
    if (span.dtype == DType::kFloat32) {
      sum = lane_sum(static_cast<const float*>(span.values) + begin, span.numel - begin, lane);
    } else if (span.dtype == DType::kBFloat16) {
      sum = lane_sum(static_cast<const BFloat16*>(span.values) + begin, span.numel - begin, lane);
    } else {
      sum = lane_sum(static_cast<const Float16*>(span.values) + begin, span.numel - begin, lane);
    }
  }
  // Groups behind the last block take part with zeros: the shuffle needs the whole warp.
  __syncwarp();
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffffU, sum, half, kNormLanes);
  }
  if (lane == 0 && block < num_blocks) {
    sums[block] = sum;
  }
}

// One CUDA block per span. All its threads read, ahead of the one that adds: the order is the
// blocks'.
template <int capacity>
__global__ void __launch_bounds__(kThreads)
    add_in_order(const __grid_constant__ Batch<capacity> batch, const double* sums,
                 double* results) {
  __shared__ double tile[kThreads];
  const int span = static_cast<int>(blockIdx.x);
  const std::int64_t first = span == 0 ? 0 : batch.spans[span - 1].last_block;
  const std::int64_t last = batch.spans[span].last_block;
  const auto thread = static_cast<std::int64_t>(threadIdx.x);
  double total = batch.spans[span].continues && threadIdx.x == 0 ? results[span] : 0;
  double next = first + thread < last ? sums[first + thread] : 0;
  for (std::int64_t begin = first; begin < last; begin += kThreads) {
    tile[threadIdx.x] = next;
    __syncthreads();
    const std::int64_t ahead = begin + kThreads + thread;
    next = ahead < last ? sums[ahead] : 0;
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(last - begin, static_cast<std::int64_t>(kThreads)));
      for (int i = 0; i < count; ++i) {
        total += tile[i];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    results[span] = total;
  }
}

// Addresses are kernel parameters as well.
constexpr int kMaxNumbers = 480;
struct Numbers {
  const double* numbers[kMaxNumbers];
  int count;
  bool is_first;
};
static_assert(sizeof(Numbers) + sizeof(double*) <= 4096);

// One CUDA block, as above: all threads read, one adds. Between launches of one list the sum is in
// `total`.
__global__ void __launch_bounds__(kMaxNumbers)
    add_numbers(const __grid_constant__ Numbers list, double* total) {
  __shared__ double numbers[kMaxNumbers];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < list.count) {
    numbers[thread] = *list.numbers[thread];
  }
  __syncthreads();
  if (thread != 0) {
    return;
  }
  double sum = list.is_first ? 0 : *total;
  for (int i = 0; i < list.count; ++i) {
    sum += numbers[i];
  }
  *total = sum;
}

// One thread.
__global__ void find_step_factors(const StepSums* sums, const __grid_constant__ StepInputs inputs,
                                  StepOnDevice* step, FoundStep* for_host) {
  const StepOnDevice found = step_rule(*sums, inputs);
  *step = found;
  for_host->step = found;
  for_host->sums = *sums;
}

std::int64_t num_blocks_of(const NormSpan& span) {
  return (span.numel + kNormBlock - 1) / kNormBlock;
}

template <int capacity>
void launch_batch(std::span<const NormSpan> spans, double* block_sums, double* results,
                  cudaStream_t stream) {
  Batch<capacity> batch{};
  std::int64_t num_blocks = 0;
  for (const NormSpan& span : spans) {
    num_blocks += num_blocks_of(span);
    batch.spans[batch.num_spans++] = {span.values, span.numel, num_blocks, span.dtype,
                                      span.continues};
  }
  if (num_blocks > 0) {
    const auto grid = static_cast<unsigned>((num_blocks + kGroups - 1) / kGroups);
    sum_blocks<<<grid, kThreads, 0, stream>>>(batch, block_sums);
    device::check_cuda("sum of squares kernel", cudaGetLastError());
  }
  add_in_order<<<static_cast<unsigned>(batch.num_spans), kThreads, 0, stream>>>(batch, block_sums,
                                                                                results);
  device::check_cuda("sum of blocks kernel", cudaGetLastError());
}

}  // namespace

std::int64_t num_norm_blocks(std::span<const NormSpan> spans) {
  std::int64_t num_blocks = 0;
  for (const NormSpan& span : spans) {
    num_blocks += num_blocks_of(span);
  }
  return num_blocks;
}

void launch_sums_of_squares(std::span<const NormSpan> spans, double* block_sums, double* results,
                            cudaStream_t stream) {
  if (!spans.empty() && spans.size() <= kFewSpans) {
    launch_batch<kFewSpans>(spans, block_sums, results, stream);
    return;
  }
  while (!spans.empty()) {
    const auto part = spans.first(spans.size() < kManySpans ? spans.size() : kManySpans);
    launch_batch<kManySpans>(part, block_sums, results, stream);
    spans = spans.subspan(part.size());
    results += part.size();
  }
}

void launch_total(std::span<const double* const> numbers, double* total, cudaStream_t stream) {
  Numbers list{};
  list.is_first = true;
  do {
    const auto part = numbers.first(numbers.size() < kMaxNumbers ? numbers.size() : kMaxNumbers);
    numbers = numbers.subspan(part.size());
    list.count = static_cast<int>(part.size());
    for (int i = 0; i < list.count; ++i) {
      list.numbers[i] = part[static_cast<std::size_t>(i)];
    }
    add_numbers<<<1, kMaxNumbers, 0, stream>>>(list, total);
    device::check_cuda("total kernel", cudaGetLastError());
    list.is_first = false;
  } while (!numbers.empty());
}

void launch_step_factors(const StepSums* sums, const StepInputs& inputs, StepOnDevice* step,
                         FoundStep* for_host, cudaStream_t stream) {
  find_step_factors<<<1, 1, 0, stream>>>(sums, inputs, step, for_host);
  device::check_cuda("step factors kernel", cudaGetLastError());
}

}  // namespace tessera::optim::cuda
