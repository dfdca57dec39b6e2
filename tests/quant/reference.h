// Block quantisation, one value after the other, as block_codec.h describes it: what every loop and
// kernel is compared with. It shares no arithmetic with them, only the conversions of core/dtype.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/quant/block_codec.h"

namespace tessera::quant {

using Bytes = std::vector<std::byte>;

// Elements of `dtype` in bytes.
float value_at(const Bytes& values, DType dtype, std::int64_t i);
void set_value(Bytes& values, DType dtype, std::int64_t i, float value);
float largest_of(DType dtype);

struct Reference {
  BlockFormat format;

  Bytes encode(const Bytes& values, DType dtype, std::int64_t numel) const;
  // Value i in fp32, before it is rounded to `dtype`.
  float decoded(const Bytes& wire, std::int64_t numel, std::int64_t i, DType dtype) const;
  Bytes decode(const Bytes& wire, std::int64_t numel, DType dtype) const;
  Bytes decode_sum(const std::vector<Bytes>& wires, std::int64_t numel, DType dtype) const;
  std::array<double, 2> measure(const Bytes& values, DType dtype, std::int64_t numel,
                                const Bytes& wire) const;

  int code_at(const Bytes& wire, std::int64_t i) const;
  BFloat16 scale_of(const Bytes& wire, std::int64_t numel, std::int64_t i) const;
};

}  // namespace tessera::quant
