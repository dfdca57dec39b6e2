// A stupid model of the collectives: values that are a function of (seed, rank, index), and sums
// written as the plainest loop. Shares no code with the library but the dtype conversions, which
// have their own exhaustive test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/core/dtype.h"

namespace tessera::comm::reference {

// What rank `rank` would put at [begin, begin + numel) of its array: magnitudes from 2^-12 to 2^12,
// both signs, so that sums depend on their order.
std::vector<std::byte> array(std::uint64_t seed, int rank, std::size_t begin, std::size_t numel,
                             DType dtype);

// The arrays of all ranks, one behind the other.
std::vector<std::byte> arrays(std::uint64_t seed, int num_ranks, std::size_t numel, DType dtype);

// Empty, small (packed) and large, in types of all widths; odd, so that nothing divides.
struct Tensor {
  std::size_t numel;
  DType dtype;
};
inline const std::vector<Tensor> kMixedTensors = {{0, DType::kFloat32},     {1, DType::kUInt8},
                                                  {20011, DType::kFloat32}, {17, DType::kBFloat16},
                                                  {70001, DType::kUInt8},   {333, DType::kInt64}};

// The sum over ranks 0 .. n-1, in this order, of [begin, begin + numel) of their arrays.
std::vector<std::byte> rank_order_sum(std::uint64_t seed, int num_ranks, std::size_t begin,
                                      std::size_t numel, DType dtype, DType out_dtype);

// Not by ==, which a sanitizer would follow byte by byte.
bool same_bytes(const std::vector<std::byte>& left, const std::vector<std::byte>& right);

}  // namespace tessera::comm::reference
