// Loops over gradients in host memory: conversions between fp32, bf16 and fp16, and sums in fp32.
//
// Every element is treated for itself, so lengths and vector widths change no bit.
//
// Threads: stateless.
#pragma once

#include <cstddef>

#include "tessera/core/dtype.h"

namespace tessera::grad {

bool is_gradient_dtype(DType dtype);  // fp32, bf16 or fp16: what the loops below take

// Rounds to nearest even; between bf16 and fp16 through fp32. The ranges must not overlap.
void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype,
                      std::size_t numel);

// sum[i] += value[i].
void add_elements(float* sum, const void* value, DType value_dtype, std::size_t numel);

}  // namespace tessera::grad
