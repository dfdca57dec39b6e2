// Where updates and norms run: on the host, by a few threads, or on a CUDA device. The bits are the
// same everywhere and for every number of threads.
//
// The sum of squares is defined by fixed blocks: kNormBlock elements each; inside a block, lane l
// of kNormLanes adds the squares (in fp64) of elements l, l + kNormLanes, ...; lanes are added
// pairwise (l += l + half, half = lanes/2 .. 1); blocks are added in order. A non-finite element
// makes it non-finite, and nothing else does: squares of fp32 cannot overflow fp64.
//
// Element types are fp32, bf16 and fp16. Halves are widened exactly before any arithmetic, and
// rounded once, to nearest even, where they are written (core/dtype.h).
//
// [Note: sums in halves]
// A sum in fp32 may lie where two addends of 16 bits were: the upper 16 bits of its elements in the
// place of one, the lower 16 in that of the other. So gradients of several micro-batches are added
// up without memory for the sum.
//
// Host kernels are enqueued on the stream like any other work; they run where its work runs.
// Lists (std::span) need not outlive the call that they are given to; the memory that they name
// must stay valid until the Pending is done.
//
// Threads: one caller at a time. Work of several streams may run at the same time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/rule.h"

namespace tessera::optim {

inline constexpr std::int64_t kNormBlock = 4096;
inline constexpr int kNormLanes = 16;

// What one sum of squares is over.
struct NormSpan {
  const void* values = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t numel = 0;
  // Goes on behind the elements whose sum is in the result, which are whole blocks.
  bool continues = false;
  // As in UpdateSpan.
  const void* low = nullptr;
  std::span<const void* const> later = {};
};

// One update of many that start together.
struct UpdateTask {
  UpdateScalars scalars;
  UpdateSpan span;
};

class Kernels {
 public:
  virtual ~Kernels() = default;
  // In the order of `stream`. The span's memory must stay valid until the Pending is done.
  device::Pending start_update(const RuleOptions& rule, const UpdateScalars& scalars,
                               const UpdateSpan& span, device::Stream& stream) {
    const UpdateTask task{scalars, span};
    return start_updates(rule, {&task, 1}, stream);
  }
  // All of them as one piece of work: dozens of small spans cost what one costs.
  virtual device::Pending start_updates(const RuleOptions& rule, std::span<const UpdateTask> tasks,
                                        device::Stream& stream) = 0;

  // *result is on the host and valid when the Pending is done. `values` are fp32.
  virtual device::Pending start_sum_of_squares(const float* values, std::int64_t numel,
                                               double* result, device::Stream& stream) = 0;
  // results[i] is the sum of squares of spans[i]. `results` is memory that kernels of the stream
  // can write: of the device or pinned on CUDA, any on CPU.
  virtual device::Pending start_sums_of_squares(std::span<const NormSpan> spans, double* results,
                                                device::Stream& stream) = 0;
  // *total is the sum of the numbers, in the order of the list; all in memory that kernels of the
  // stream reach.
  virtual device::Pending start_total(std::span<const double* const> numbers, double* total,
                                      device::Stream& stream) = 0;
  // From sums over all ranks to the factors of the step: the bits of step_factors(). `sums` is in
  // memory that kernels of the stream can read; so is `step`, for updates behind it
  // (UpdateScalars::on_device). `for_host` gets both, in memory that both they and the host reach;
  // it is valid when the Pending is done. Checks its inputs; a step whose weights give no mean
  // skips.
  virtual device::Pending start_step_factors(const StepSums* sums, const StepInputs& inputs,
                                             StepOnDevice* step, FoundStep* for_host,
                                             device::Stream& stream) = 0;

  // values[i] += addend[i]
  virtual device::Pending start_add(float* values, const void* addend, DType dtype,
                                    std::int64_t numel, device::Stream& stream) = 0;
  device::Pending start_add(float* values, const float* addend, std::int64_t numel,
                            device::Stream& stream) {
    return start_add(values, addend, DType::kFloat32, numel, stream);
  }

  // The sum of this and of later micro-batches takes the place of the first ones, whose memory is
  // written: that of `values`, in fp32; of 16 bits, in halves, `values` and `low` or, if that is
  // null, the first of `later`. Kernels of the host alone.
  virtual device::Pending start_fold(const NormSpan& span, device::Stream& stream) = 0;
  // to[i] = the sum whose halves these are.
  virtual device::Pending start_join(float* to, const void* high, const void* low,
                                     std::int64_t numel, device::Stream& stream) = 0;

  // to[i] = from[i] * scale, rounded to `to_dtype`. A scale of 1 leaves the product out: then NaNs
  // keep what core/dtype.h leaves of them.
  virtual device::Pending start_convert(void* to, DType to_dtype, const void* from,
                                        DType from_dtype, float scale, std::int64_t numel,
                                        device::Stream& stream) = 0;
  // *sum += the hash of these bytes (content_hash.cuh), the same on every device. `sum` is memory
  // that kernels of the stream can write. REQUIRES: `data` is aligned to 8 bytes.
  virtual device::Pending start_hash(const void* data, std::size_t bytes, std::uint64_t* sum,
                                     device::Stream& stream) = 0;
  // to[i] = from[i]
  device::Pending start_widen(float* to, const void* from, DType dtype, std::int64_t numel,
                              device::Stream& stream) {
    return start_convert(to, DType::kFloat32, from, dtype, 1.0F, numel, stream);
  }
};

// Makes the parameter of a span from its master, which an update does at its end: for one that
// moves with its states and is not updated.
inline device::Pending start_parameter(Kernels& kernels, const UpdateSpan& span,
                                       device::Stream& stream) {
  return span.parameter == nullptr
             ? stream.record()
             : kernels.start_convert(span.parameter, span.parameter_dtype, span.master,
                                     DType::kFloat32, 1.0F, span.numel, stream);
}

// `num_threads`: at least 1, the calling one included. `cores`: where they run (core_binding.h),
// cores[0] being left to the caller; empty: anywhere.
std::unique_ptr<Kernels> make_cpu_kernels(int num_threads, const std::vector<int>& cores = {});
// `device` must be a CUDA device and outlive the kernels. Throws DeviceError in a build without
// CUDA.
std::unique_ptr<Kernels> make_cuda_kernels(device::Device& device);

// The reference of start_sum_of_squares(), and what the CPU runs.
double sum_of_squares(const NormSpan& span);
inline double sum_of_squares(const float* values, std::int64_t numel) {
  return sum_of_squares(NormSpan{values, DType::kFloat32, numel});
}

}  // namespace tessera::optim
