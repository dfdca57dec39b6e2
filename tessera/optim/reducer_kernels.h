// The kernels with which a grad::Reducer works on a device with memory of its own, which the host
// must not touch.
//
// Threads: as Kernels.
#pragma once

#include <span>

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
                                    double* result, bool continues, device::Stream& stream) {
    const NormSpan span{values, dtype, numel, continues};
    return kernels.start_sums_of_squares({&span, 1}, result, stream);
  };
}

// For gradients of several micro-batches in memory of the host. `stream`: of a device that is the
// host, where nobody else has work; all of it outlives the reducer.
inline void set_host_kernels(grad::ReducerParts& parts, Kernels& kernels, device::Stream& stream) {
  parts.host_widen = [&](float* to, const void* value, DType dtype, std::int64_t numel) {
    kernels.start_widen(to, value, dtype, numel, stream).wait();
  };
  parts.host_add = [&](float* sum, const void* value, DType dtype, std::int64_t numel) {
    kernels.start_add(sum, value, dtype, numel, stream).wait();
  };
  const auto span_of = [](const grad::HostAddends& addends, std::int64_t numel) {
    return NormSpan{addends.values, addends.dtype, numel, false, addends.low, addends.later};
  };
  parts.host_sum_of_squares = [&, span_of](const grad::HostAddends& addends, std::int64_t numel) {
    double result = 0;
    const NormSpan span = span_of(addends, numel);
    kernels.start_sums_of_squares({&span, 1}, &result, stream).wait();
    return result;
  };
  parts.host_fold = [&, span_of](const grad::HostAddends& addends, std::int64_t numel) {
    kernels.start_fold(span_of(addends, numel), stream).wait();
  };
}

}  // namespace tessera::optim
