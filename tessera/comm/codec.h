// How elements travel where they do not travel as they are: as blocks of integers with scales, say
// (quant/block_codec.h). A call with a codec moves wire_bytes() in place of its elements, and
// decodes what arrives, in the order of ranks.
//
// Invariants:
//  (1) wire_bytes() is a function of the number of elements alone, a multiple of 16, zero for none.
//  (2) Every byte of the wire is defined, padding included, and equal for equal values, on every
//      machine and device: what is encoded there is decoded here.
//  (3) A value that is not finite is not finite after decoding, whatever its neighbours become.
//  (4) Values are added in fp32 in the order of the wires, and rounded once.
//
// Threads: every method from any thread; with a stream the work is enqueued there, memory is the
// device's and stays valid until the Pending is done; without one it is done when they return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/core/dtype.h"
#include "tessera/device/device.h"

namespace tessera::comm {

class Codec {
 public:
  virtual ~Codec() = default;
  // "int8 blocks of 128": equal on all ranks of a call, and compared with its tag.
  virtual std::string_view name() const = 0;
  virtual std::size_t wire_bytes(std::int64_t numel) const = 0;

  // `dtype` of values: fp32, bf16 or fp16. `wire`: wire_bytes(numel), aligned to 16 bytes.
  virtual device::Pending encode(const void* values, DType dtype, std::int64_t numel,
                                 std::byte* wire, device::Stream* stream) const = 0;
  // Rounded once to `dtype`, to nearest even.
  virtual device::Pending decode(const std::byte* wire, std::int64_t numel, void* values,
                                 DType dtype, device::Stream* stream) const = 0;
  // Of `num_wires` wires of `numel` values each, `stride` bytes apart.
  virtual device::Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                                     std::int64_t numel, void* sum, DType dtype,
                                     device::Stream* stream) const = 0;
  // result[0]: sum of squares of decoded less true values; result[1]: of true values. Both in fp64,
  // in an order that only `numel` decides. `continues`: added to what result holds.
  virtual device::Pending measure(const void* values, DType dtype, std::int64_t numel,
                                  const std::byte* wire, double* result, bool continues,
                                  device::Stream* stream) const = 0;
};

}  // namespace tessera::comm
