// The loops over blocks in memory of the host, once per instruction set (core/vector_loops.h,
// [Note: instruction sets]). All versions give the same bits: block_rules.cuh.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/core/dtype.h"
#include "tessera/quant/block_codec.h"

namespace tessera::quant {

// As comm::Codec; arguments are not checked.
struct BlockLoops {
  std::string_view name;  // "baseline", "x86-64-v3"
  void (*encode)(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                 std::byte* wire);
  void (*decode)(const BlockFormat& format, const std::byte* wire, std::int64_t numel, void* values,
                 DType dtype);
  void (*decode_sum)(const BlockFormat& format, const std::byte* wires, std::size_t stride,
                     int num_wires, std::int64_t numel, void* sum, DType dtype);
  // Of one chunk of the measure; see block_codec.h. sums[0]: of the errors; [1]: of the values.
  void (*chunk_squares)(const BlockFormat& format, const void* values, DType dtype,
                        std::int64_t numel, const std::byte* wire, std::int64_t chunk,
                        double* sums);
};

// What this machine can run, best last.
std::span<const BlockLoops> runnable_block_loops();
inline const BlockLoops& best_block_loops() { return runnable_block_loops().back(); }

// The sum of chunks in the order of block_codec.h.
void measure_blocks(const BlockLoops& loops, const BlockFormat& format, const void* values,
                    DType dtype, std::int64_t numel, const std::byte* wire, double* result,
                    bool continues);

}  // namespace tessera::quant
