// The kernels of the GPU as functions that launch them: in the order of a stream, without waiting,
// on the device that is current. Errors of a launch are thrown as DeviceError.
//
// Threads: stateless. For CUDA sources only.
#pragma once

#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "tessera/optim/element_rules.cuh"
#include "tessera/optim/kernels.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim::cuda {

struct RoundedTask {
  ElementScalars scalars;
  UpdateSpan span;
  const StepOnDevice* step = nullptr;  // see UpdateScalars::on_device
};

// update_cuda.cu. One launch for every few dozen tasks whose `step` is the same.
void launch_updates(ElementRule rule, std::span<const RoundedTask> tasks, cudaStream_t stream);

// norm_cuda.cu. `block_sums`: num_norm_blocks(spans) doubles of the device. Two launches for up to
// some hundreds of spans.
std::int64_t num_norm_blocks(std::span<const NormSpan> spans);
void launch_sums_of_squares(std::span<const NormSpan> spans, double* block_sums, double* results,
                            cudaStream_t stream);
// One launch for up to some hundreds of numbers.
void launch_total(std::span<const double* const> numbers, double* total, cudaStream_t stream);
void launch_step_factors(const StepSums* sums, const StepInputs& inputs, StepOnDevice* step,
                         FoundStep* for_host, cudaStream_t stream);

// convert_cuda.cu
void launch_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                cudaStream_t stream);
void launch_join(float* to, const void* high, const void* low, std::int64_t numel,
                 cudaStream_t stream);
void launch_convert(void* to, DType to_dtype, const void* from, DType from_dtype, float scale,
                    std::int64_t numel, cudaStream_t stream);

// hash_cuda.cu. REQUIRES: bytes > 0.
void launch_hash(const void* data, std::int64_t bytes, std::uint64_t* sum, cudaStream_t stream);

}  // namespace tessera::optim::cuda
