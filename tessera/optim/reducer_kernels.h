// The kernels with which a grad::Reducer works on a device with memory of its own, which the host
// must not touch.
//
// Threads: as Kernels.
#pragma once

#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"

namespace tessera::optim {

// `kernels` outlive the reducer.
inline void set_reducer_kernels(grad::ReducerParts& parts, Kernels& kernels) {
  parts.add = [&kernels](float* sum, const void* value, DType dtype, std::int64_t numel,
                         device::Stream& stream) {
    return kernels.start_add(sum, value, dtype, numel, stream);
  };
  parts.convert = [&kernels](void* to, DType to_dtype, const void* from, DType from_dtype,
                             std::int64_t numel, device::Stream& stream) {
    return kernels.start_convert(to, to_dtype, from, from_dtype, 1.0F, numel, stream);
  };
  parts.sum_of_squares = [&kernels](const void* values, DType dtype, std::int64_t numel,
                                    double* result, device::Stream& stream) {
    const NormSpan span{values, dtype, numel};
    return kernels.start_sums_of_squares({&span, 1}, result, stream);
  };
}

}  // namespace tessera::optim
