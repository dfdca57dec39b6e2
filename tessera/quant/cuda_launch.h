// The kernels over blocks on an NVIDIA GPU as functions that launch them: in the order of a stream,
// without waiting, on the device that is current. Arguments are those of comm::Codec, checked, with
// at least one value. Errors of a launch are thrown as DeviceError.
//
// Threads: stateless. For CUDA sources only.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "tessera/core/dtype.h"
#include "tessera/quant/block_codec.h"

namespace tessera::quant::cuda {

void launch_encode(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                   std::byte* wire, cudaStream_t stream);
void launch_decode(const BlockFormat& format, const std::byte* wire, std::int64_t numel,
                   void* values, DType dtype, cudaStream_t stream);
void launch_decode_sum(const BlockFormat& format, const std::byte* wires, std::size_t stride,
                       int num_wires, std::int64_t numel, void* sum, DType dtype,
                       cudaStream_t stream);
// `slots`: two doubles of the device for each of kMeasureSlots. Two launches; also without values.
void launch_measure(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                    const std::byte* wire, double* slots, double* result, bool continues,
                    cudaStream_t stream);

}  // namespace tessera::quant::cuda
