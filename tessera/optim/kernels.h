// Where updates and norms run: on the host, by a few threads, or on a CUDA device. The bits are the
// same everywhere and for every number of threads.
//
// The sum of squares is defined by fixed blocks: kNormBlock elements each; inside a block, lane l
// of kNormLanes adds the squares (in fp64) of elements l, l + kNormLanes, ...; lanes are added
// pairwise (l += l + half, half = lanes/2 .. 1); blocks are added in order. A non-finite element
// makes it non-finite, and nothing else does: squares of fp32 cannot overflow fp64.
//
// Host kernels are enqueued on the stream like any other work; they run where its work runs.
//
// Threads: one caller at a time. Work of several streams may run at the same time.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/device/device.h"
#include "tessera/optim/rule.h"

namespace tessera::optim {

inline constexpr std::int64_t kNormBlock = 4096;
inline constexpr int kNormLanes = 16;

class Kernels {
 public:
  virtual ~Kernels() = default;
  // In the order of `stream`. The span's memory must stay valid until the Pending is done.
  virtual device::Pending start_update(const RuleOptions& rule, const UpdateScalars& scalars,
                                       const UpdateSpan& span, device::Stream& stream) = 0;
  // *result is on the host and valid when the Pending is done. `values` are fp32.
  virtual device::Pending start_sum_of_squares(const float* values, std::int64_t numel,
                                               double* result, device::Stream& stream) = 0;
  // values[i] += addend[i]
  virtual device::Pending start_add(float* values, const float* addend, std::int64_t numel,
                                    device::Stream& stream) = 0;
  // to[i] = from[i], which is bf16 or fp16: exact.
  virtual device::Pending start_widen(float* to, const void* from, DType dtype, std::int64_t numel,
                                      device::Stream& stream) = 0;
};

// `num_threads`: at least 1, the calling one included.
std::unique_ptr<Kernels> make_cpu_kernels(int num_threads);
// `device` must be a CUDA device and outlive the kernels. Throws DeviceError in a build without
// CUDA.
std::unique_ptr<Kernels> make_cuda_kernels(device::Device& device);

// The reference of start_sum_of_squares(), and what the CPU runs.
double sum_of_squares(const float* values, std::int64_t numel);

}  // namespace tessera::optim
