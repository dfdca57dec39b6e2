// Elements of one floating type as those of another, rounded once; internal to models.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <span>

#include "tessera/core/dtype.h"

namespace tessera::models {

// fp32, bf16 and fp16. The memory need not be aligned. The same type: copied, bit for bit.
// REQUIRES: from.size() is a whole number of elements; `to` has room for as many, apart from them.
void convert_elements(DType from_type, std::span<const std::byte> from, DType to_type,
                      std::byte* to);

}  // namespace tessera::models
