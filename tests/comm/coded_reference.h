// What calls with testing/plain_codec.h must give, made of the reference's arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "testing/plain_codec.h"
#include "tests/comm/reference.h"

namespace tessera::comm::reference {

inline std::vector<float> decoded(std::uint64_t seed, int rank, std::size_t begin,
                                  std::size_t numel, DType dtype) {
  const std::vector<std::byte> values = array(seed, rank, begin, numel, dtype);
  return through_plain_codec(to_floats(values.data(), dtype, static_cast<std::int64_t>(numel)));
}

inline std::vector<std::byte> stored(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * bytes_of(dtype));
  from_floats(values, bytes.data(), dtype);
  return bytes;
}

// `num_wires` consecutive pieces of `numel` elements of that rank, each encoded by itself.
inline std::vector<std::byte> wires(std::uint64_t seed, int rank, std::size_t numel,
                                    std::size_t num_wires, DType dtype) {
  const PlainCodec codec;
  const std::size_t bytes = codec.wire_bytes(static_cast<std::int64_t>(numel));
  std::vector<std::byte> all(bytes * num_wires);
  for (std::size_t wire = 0; wire < num_wires; ++wire) {
    const std::vector<std::byte> values = array(seed, rank, wire * numel, numel, dtype);
    codec
        .encode(values.data(), dtype, static_cast<std::int64_t>(numel), all.data() + wire * bytes,
                nullptr)
        .wait();
  }
  return all;
}

// What such wires of all ranks decode to, in rank order.
inline std::vector<std::byte> decoded_wires(std::uint64_t seed, int num_ranks, std::size_t numel,
                                            std::size_t num_wires, DType dtype) {
  std::vector<std::byte> all;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (std::size_t wire = 0; wire < num_wires; ++wire) {
      const auto bytes = stored(decoded(seed, rank, wire * numel, numel, dtype), dtype);
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
  }
  return all;
}

// The sum in rank order of [begin, begin + numel) of the ranks' arrays, each piece encoded once.
inline std::vector<std::byte> decoded_sum(std::uint64_t seed, int num_ranks, std::size_t begin,
                                          std::size_t numel, DType dtype, DType out_dtype) {
  std::vector<float> sum = decoded(seed, 0, begin, numel, dtype);
  for (int rank = 1; rank < num_ranks; ++rank) {
    const std::vector<float> next = decoded(seed, rank, begin, numel, dtype);
    for (std::size_t i = 0; i < numel; ++i) {
      sum[i] += next[i];
    }
  }
  return stored(sum, out_dtype);
}

}  // namespace tessera::comm::reference
