// The shard of a parameter that is stored as blocks (stored_format.h), in memory of the host, while
// it is filled: tile by tile, so that what is in full precision is one tile of one parameter.
//
// Threads: one caller at a time; the work is shared among the machine's.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/shard/param.h"

namespace tessera::shard {

// What encoding has changed: sums of squares of decoded less true values, and of true values.
struct EncodingChange {
  double error = 0;
  double values = 0;

  double relative() const { return values == 0 ? 0 : std::sqrt(error / values); }
  EncodingChange& operator+=(const EncodingChange& other) {
    error += other.error;
    values += other.values;
    return *this;
  }
};

class StoredShard {
 public:
  // Of zeros. REQUIRES: the parameter's layout is encoded.
  explicit StoredShard(const Param& param);

  // All of it, padding included: as it lies in memory, on NVMe and on the network.
  std::span<std::byte> bytes() { return bytes_; }
  // Elements [begin, begin + numel), of the parameter's type, in memory of the host; begin is a
  // multiple of the format's step, and so is the end unless it is that of the parameter's range.
  void encode(std::int64_t begin, std::int64_t numel, const void* values);
  // The same, where values that decode from what is there keep their blocks: a block is encoded
  // only if an element of it differs.
  void update(std::int64_t begin, std::int64_t numel, const void* values);
  // By encode(), of all that it was given; the same on any number of threads.
  const EncodingChange& change() const { return change_; }
  // Elements [begin, begin + numel), wherever they begin.
  void decode(std::int64_t begin, std::int64_t numel, void* values) const;

 private:
  EncodingChange encode_piece(std::int64_t begin, std::int64_t numel, const std::byte* values,
                              bool keeps_blocks);
  void encode_pieces(std::int64_t begin, std::int64_t numel, const void* values, bool keeps_blocks);

  const Param& param_;
  const StoredBytes places_;
  std::vector<std::byte> bytes_;
  EncodingChange change_;
};

// Elements [begin, begin + numel), where begin is a multiple of a block, of what `places`
// describes, in a wire of their own, which has room for them.
void cut_wire(StoredFormat format, const StoredBytes& places, const std::byte* from,
              std::int64_t begin, std::int64_t numel, std::byte* wire);

}  // namespace tessera::shard
