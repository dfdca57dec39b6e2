// Updates and norms on an NVIDIA GPU: checks, scratch memory and the order of streams. The kernels
// themselves are behind cuda_launch.h.
#include <array>
#include <cstddef>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "tessera/core/error.h"
#include "tessera/device/cuda_stream.h"
#include "tessera/optim/cuda_launch.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {
namespace {

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

  using Kernels::start_add;

  device::Pending start_updates(const RuleOptions& rule, std::span<const UpdateTask> tasks,
                                device::Stream& stream) override {
    std::vector<cuda::RoundedTask> rounded;
    rounded.reserve(tasks.size());
    for (const UpdateTask& task : tasks) {
      check_update(rule, task.scalars, task.span);
      TESSERA_INVARIANT(task.span.low == nullptr && task.span.later.empty(),
                        "an update adds micro-batches on the device");
      rounded.push_back({element_scalars(rule, task.scalars), task.span, task.scalars.on_device});
    }
    return cuda_stream(stream).launch(
        [&](cudaStream_t handle) { cuda::launch_updates(element_rule(rule), rounded, handle); },
        "update");
  }

  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    // Through pinned memory: kernels cannot write `result` itself. All uses of the scratch memory
    // are on this stream, so they do not meet.
    Scratch& scratch = scratch_.at(static_cast<std::size_t>(stream.kind()));
    if (scratch.host.data() == nullptr) {
      scratch.host = device_.allocate(Tier::kPinned, sizeof(double), Role::kStaging);
    }
    auto* on_host = reinterpret_cast<double*>(scratch.host.data());
    const NormSpan span{values, DType::kFloat32, numel};
    std::ignore = start_sums_of_squares({&span, 1}, on_host, stream);
    scratch.last_use = stream.enqueue([result, on_host] { *result = *on_host; });
    return scratch.last_use;
  }

  device::Pending start_sums_of_squares(std::span<const NormSpan> spans, double* results,
                                        device::Stream& stream) override {
    for (const NormSpan& span : spans) {
      TESSERA_INVARIANT(span.numel >= 0 && span.low == nullptr && span.later.empty(),
                        "sum of squares of ", span.numel, " elements, ", span.later.size(),
                        " more micro-batches");
      check_element_type("sum of squares", span.dtype);
    }
    Scratch& scratch = scratch_for(stream, cuda::num_norm_blocks(spans));
    auto* block_sums = reinterpret_cast<double*>(scratch.block_sums.data());
    scratch.last_use = cuda_stream(stream).launch(
        [&](cudaStream_t handle) {
          cuda::launch_sums_of_squares(spans, block_sums, results, handle);
        },
        "norm");
    return scratch.last_use;
  }

  device::Pending start_total(std::span<const double* const> numbers, double* total,
                              device::Stream& stream) override {
    return cuda_stream(stream).launch(
        [&](cudaStream_t handle) { cuda::launch_total(numbers, total, handle); }, "norm");
  }

  device::Pending start_step_factors(const StepSums* sums, const StepInputs& inputs,
                                     StepOnDevice* step, FoundStep* for_host,
                                     device::Stream& stream) override {
    check_step_inputs(inputs);
    return cuda_stream(stream).launch(
        [&](cudaStream_t handle) {
          cuda::launch_step_factors(sums, inputs, step, for_host, handle);
        },
        "step factors");
  }

  device::Pending start_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                            device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of ", numel, " elements");
    check_element_type("sum with an addend", dtype);
    return launch("add", numel, stream, [&](cudaStream_t handle) {
      cuda::launch_add(values, addend, dtype, numel, handle);
    });
  }

  device::Pending start_fold(const NormSpan& span, device::Stream& /*stream*/) override {
    TESSERA_INVARIANT(false, "micro-batches of ", span.numel, " elements are added on the device");
  }

  device::Pending start_join(float* to, const void* high, const void* low, std::int64_t numel,
                             device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "halves of ", numel, " elements");
    return launch("join", numel, stream,
                  [&](cudaStream_t handle) { cuda::launch_join(to, high, low, numel, handle); });
  }

  device::Pending start_convert(void* to, DType to_dtype, const void* from, DType from_dtype,
                                float scale, std::int64_t numel, device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "conversion of ", numel, " elements");
    check_element_type("conversion to values", to_dtype);
    check_element_type("conversion from values", from_dtype);
    return launch("cast", numel, stream, [&](cudaStream_t handle) {
      cuda::launch_convert(to, to_dtype, from, from_dtype, scale, numel, handle);
    });
  }

  device::Pending start_hash(const void* data, std::size_t bytes, std::uint64_t* sum,
                             device::Stream& stream) override {
    check_hashed(data);
    const auto numel = static_cast<std::int64_t>(bytes);
    return launch("hash", numel, stream,
                  [&](cudaStream_t handle) { cuda::launch_hash(data, numel, sum, handle); });
  }

 private:
  // Of one stream.
  struct Scratch {
    device::Memory block_sums;
    device::Memory host;  // pinned
    device::Pending last_use;
    std::vector<device::Memory> outgrown;  // work in flight may still use them
  };

  template <typename Launch>
  device::Pending launch(const char* label, std::int64_t numel, device::Stream& stream,
                         const Launch& start) {
    if (numel == 0) {
      return stream.record();  // CUDA refuses a grid without blocks
    }
    return cuda_stream(stream).launch(start, label);
  }

  Scratch& scratch_for(device::Stream& stream, std::int64_t num_blocks) {
    Scratch& scratch = scratch_.at(static_cast<std::size_t>(stream.kind()));
    const std::size_t bytes = static_cast<std::size_t>(num_blocks) * sizeof(double);
    if (scratch.block_sums.bytes() < bytes) {
      // Twice as much each time: all that was outgrown is together no more than this.
      const std::size_t doubled = 2 * scratch.block_sums.bytes();
      scratch.outgrown.push_back(std::move(scratch.block_sums));
      scratch.block_sums =
          device_.allocate(Tier::kDevice, bytes > doubled ? bytes : doubled, Role::kStaging);
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
