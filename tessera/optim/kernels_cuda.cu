// Updates and norms on an NVIDIA GPU. The arithmetic is the host's (element_rules.cuh, and the
// blocks of kernels.h); this file only spreads it over threads.
#include <array>
#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tessera/core/error.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_stream.h"
#include "tessera/optim/element_rules.cuh"
#include "tessera/optim/kernels.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {
namespace {

constexpr int kThreads = 256;
// Enough to fill any GPU of today; threads walk on in strides from there.
constexpr std::int64_t kMaxGrid = 8192;

struct NoParameter {};

__device__ inline float widened(float value) { return value; }
__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widened(__half value) { return __half2float(value); }

__device__ inline void narrow(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half& out) { out = __float2half_rn(value); }

__device__ inline std::int64_t first_element() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t element_stride() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

template <typename Gradient, typename Parameter>
struct Elements {
  float* master;
  const Gradient* gradient;
  float* first;
  float* second;
  Parameter* parameter;
  std::int64_t numel;
};

template <typename Rule, typename Gradient, typename Parameter>
__global__ void update_elements(ElementScalars scalars, Elements<Gradient, Parameter> elements) {
  for (std::int64_t i = first_element(); i < elements.numel; i += element_stride()) {
    float weight = elements.master[i];
    float first = 0;
    float second = 0;
    if constexpr (Rule::kNumStates > 0) {
      first = elements.first[i];
    }
    if constexpr (Rule::kNumStates > 1) {
      second = elements.second[i];
    }
    Rule::update(scalars, widened(elements.gradient[i]) * scalars.gradient_scale, weight, first,
                 second);
    elements.master[i] = weight;
    if constexpr (Rule::kNumStates > 0) {
      elements.first[i] = first;
    }
    if constexpr (Rule::kNumStates > 1) {
      elements.second[i] = second;
    }
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      narrow(weight, elements.parameter[i]);
    }
  }
}

__global__ void add_elements(float* values, const float* addend, std::int64_t numel) {
  for (std::int64_t i = first_element(); i < numel; i += element_stride()) {
    values[i] += addend[i];
  }
}

template <typename Half>
__global__ void widen_elements(float* to, const Half* from, std::int64_t numel) {
  for (std::int64_t i = first_element(); i < numel; i += element_stride()) {
    to[i] = widened(from[i]);
  }
}

// One group of kNormLanes threads per block of the norm; a warp holds whole groups.
constexpr int kGroups = kThreads / kNormLanes;
static_assert(32 % kNormLanes == 0 && kThreads % 32 == 0);

__global__ void sum_blocks(const float* values, std::int64_t numel, double* sums,
                           std::int64_t num_blocks) {
  const int lane = static_cast<int>(threadIdx.x) % kNormLanes;
  const std::int64_t block =
      static_cast<std::int64_t>(blockIdx.x) * kGroups + static_cast<int>(threadIdx.x) / kNormLanes;
  const std::int64_t begin = block * kNormBlock;
  const std::int64_t end = begin + kNormBlock < numel ? begin + kNormBlock : numel;
  double sum = 0;
  for (std::int64_t i = begin + lane; i < end; i += kNormLanes) {
    const double value = values[i];
    sum += value * value;
  }
  // Groups behind the last block take part with zeros: the shuffle needs the whole warp.
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffffU, sum, half, kNormLanes);
  }
  if (lane == 0 && block < num_blocks) {
    sums[block] = sum;
  }
}

// All threads of one CUDA block read, one of them adds: the order is the blocks'.
__global__ void add_in_order(const double* sums, std::int64_t num_blocks, double* total) {
  __shared__ double tile[kThreads];
  double sum = 0;
  for (std::int64_t begin = 0; begin < num_blocks; begin += kThreads) {
    const std::int64_t index = begin + threadIdx.x;
    if (index < num_blocks) {
      tile[threadIdx.x] = sums[index];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const std::int64_t left = num_blocks - begin;
      const int count = left < kThreads ? static_cast<int>(left) : kThreads;
      for (int i = 0; i < count; ++i) {
        sum += tile[i];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *total = sum;
  }
}

unsigned grid_for(std::int64_t numel) {
  const std::int64_t blocks = (numel + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
}

template <typename Rule, typename Gradient, typename Parameter>
void launch_elements(const ElementScalars& scalars, const UpdateSpan& span, cudaStream_t stream) {
  const Elements<Gradient, Parameter> elements{
      span.master,    static_cast<const Gradient*>(span.gradient), span.states[0],
      span.states[1], static_cast<Parameter*>(span.parameter),     span.numel};
  update_elements<Rule><<<grid_for(span.numel), kThreads, 0, stream>>>(scalars, elements);
}

template <typename Rule, typename Gradient>
void launch_parameter(const ElementScalars& scalars, const UpdateSpan& span, cudaStream_t stream) {
  if (span.parameter == nullptr) {
    launch_elements<Rule, Gradient, NoParameter>(scalars, span, stream);
  } else if (span.parameter_dtype == DType::kBFloat16) {
    launch_elements<Rule, Gradient, __nv_bfloat16>(scalars, span, stream);
  } else {
    launch_elements<Rule, Gradient, __half>(scalars, span, stream);
  }
}

template <typename Rule>
void launch_rule(const ElementScalars& scalars, const UpdateSpan& span, cudaStream_t stream) {
  if (span.gradient_dtype == DType::kFloat32) {
    launch_parameter<Rule, float>(scalars, span, stream);
  } else {
    launch_parameter<Rule, __nv_bfloat16>(scalars, span, stream);
  }
}

void launch_update(ElementRule rule, const ElementScalars& scalars, const UpdateSpan& span,
                   cudaStream_t stream) {
  switch (rule) {
    case ElementRule::kAdamW:
      return launch_rule<AdamWElement>(scalars, span, stream);
    case ElementRule::kAdam:
      return launch_rule<AdamElement>(scalars, span, stream);
    case ElementRule::kSgd:
      return launch_rule<SgdElement>(scalars, span, stream);
    case ElementRule::kMomentum:
      return launch_rule<MomentumElement>(scalars, span, stream);
    case ElementRule::kLion:
      return launch_rule<LionElement>(scalars, span, stream);
  }
}

device::CudaStream& cuda_stream(device::Stream& stream) {
  auto* own = dynamic_cast<device::CudaStream*>(&stream);
  TESSERA_INVARIANT(own != nullptr, "CUDA kernels on the ", to_string(stream.kind()),
                    " stream of a device that is not CUDA's");
  return *own;
}

class CudaKernels final : public Kernels {
 public:
  explicit CudaKernels(device::Device& device) : device_(device) {
    cuda_stream(device.stream(device::StreamKind::kCompute));
  }

  // The scratch memory below may still be in use.
  ~CudaKernels() override {
    for (Scratch& scratch : scratch_) {
      try {
        scratch.last_use.wait();
      } catch (const Error&) {
        // Whoever waits for the work learns of it.
      }
    }
  }

  device::Pending start_update(const RuleOptions& rule, const UpdateScalars& scalars,
                               const UpdateSpan& span, device::Stream& stream) override {
    check_update(rule, scalars, span);
    const ElementRule element = element_rule(rule);
    const ElementScalars rounded = element_scalars(rule, scalars);
    return launch("update kernel", span.numel, stream,
                  [&](cudaStream_t handle) { launch_update(element, rounded, span, handle); });
  }

  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of squares of ", numel, " elements");
    const std::int64_t num_blocks = (numel + kNormBlock - 1) / kNormBlock;
    Scratch& scratch = scratch_for(stream, num_blocks);
    auto* total = reinterpret_cast<double*>(scratch.total.data());
    auto* sums = reinterpret_cast<double*>(scratch.block_sums.data());
    const auto grid = static_cast<unsigned>((num_blocks + kGroups - 1) / kGroups);
    std::ignore = cuda_stream(stream).launch([&](cudaStream_t handle) {
      if (num_blocks > 0) {
        sum_blocks<<<grid, kThreads, 0, handle>>>(values, numel, sums, num_blocks);
        device::check_cuda("sum of squares kernel", cudaGetLastError());
      }
      add_in_order<<<1, kThreads, 0, handle>>>(sums, num_blocks, total);
      device::check_cuda("sum of blocks kernel", cudaGetLastError());
    });
    // Through pinned memory: a copy to `result` itself, which is pageable, would hold up the host.
    // All uses of the scratch memory are on this stream, so they do not meet.
    const auto* on_host = reinterpret_cast<const double*>(scratch.host.data());
    std::ignore = device_.start_copy(scratch.host.data(), total, sizeof(double), stream);
    scratch.last_use = stream.enqueue([result, on_host] { *result = *on_host; });
    return scratch.last_use;
  }

  device::Pending start_add(float* values, const float* addend, std::int64_t numel,
                            device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of ", numel, " elements");
    return launch("add kernel", numel, stream, [&](cudaStream_t handle) {
      add_elements<<<grid_for(numel), kThreads, 0, handle>>>(values, addend, numel);
    });
  }

  device::Pending start_widen(float* to, const void* from, DType dtype, std::int64_t numel,
                              device::Stream& stream) override {
    TESSERA_INVARIANT(dtype == DType::kBFloat16 || dtype == DType::kFloat16, "widening of ",
                      to_string(dtype), "; bf16 and fp16 are known");
    return launch("widen kernel", numel, stream, [&](cudaStream_t handle) {
      if (dtype == DType::kBFloat16) {
        widen_elements<<<grid_for(numel), kThreads, 0, handle>>>(
            to, static_cast<const __nv_bfloat16*>(from), numel);
      } else {
        widen_elements<<<grid_for(numel), kThreads, 0, handle>>>(
            to, static_cast<const __half*>(from), numel);
      }
    });
  }

 private:
  // Of one stream.
  struct Scratch {
    device::Memory block_sums;
    device::Memory total;
    device::Memory host;  // pinned
    device::Pending last_use;
    std::vector<device::Memory> outgrown;  // work in flight may still use them
  };

  template <typename Launch>
  device::Pending launch(const char* name, std::int64_t numel, device::Stream& stream,
                         const Launch& start) {
    if (numel == 0) {
      return stream.record();  // CUDA refuses a grid without blocks
    }
    return cuda_stream(stream).launch([&](cudaStream_t handle) {
      start(handle);
      device::check_cuda(name, cudaGetLastError());
    });
  }

  Scratch& scratch_for(device::Stream& stream, std::int64_t num_blocks) {
    Scratch& scratch = scratch_.at(static_cast<std::size_t>(stream.kind()));
    if (scratch.total.data() == nullptr) {
      scratch.total = device_.allocate(device::MemoryKind::kDevice, sizeof(double), Role::kStaging);
      scratch.host = device_.allocate(device::MemoryKind::kPinned, sizeof(double), Role::kStaging);
    }
    const std::size_t bytes = static_cast<std::size_t>(num_blocks) * sizeof(double);
    if (scratch.block_sums.bytes() < bytes) {
      // Twice as much each time: all that was outgrown is together no more than this.
      const std::size_t doubled = 2 * scratch.block_sums.bytes();
      scratch.outgrown.push_back(std::move(scratch.block_sums));
      scratch.block_sums = device_.allocate(device::MemoryKind::kDevice,
                                            bytes > doubled ? bytes : doubled, Role::kStaging);
    }
    return scratch;
  }

  device::Device& device_;
  std::array<Scratch, device::kNumStreams> scratch_;
};

}  // namespace

std::unique_ptr<Kernels> make_cuda_kernels(device::Device& device) {
  return std::make_unique<CudaKernels>(device);
}

}  // namespace tessera::optim
