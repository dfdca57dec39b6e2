// Frozen weights that are stored as blocks of integers with scales (quant/block_codec.h): how their
// bytes lie in a shard, and which parameters are stored so.
//
// Invariants:
//  (1) A shard of such a parameter begins at a multiple of StoredFormat::step() elements: its
//      blocks are those of the whole parameter, on any number of ranks, so that bytes can be cut
//      anew exactly.
//  (2) What is stored follows from option, name, shape and trainability as it was registered: the
//      same on all ranks, in a plan and in an engine.
//
// Threads: plain data; const methods from any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/quant/block_codec.h"

namespace tessera::shard {

// How the elements of a parameter are stored.
struct StoredFormat {
  int bits = 0;                    // of an integer: 4 or 8; 0: elements are stored as they are
  std::int64_t block_numel = 128;  // that share a scale

  bool is_encoded() const { return bits != 0; }
  quant::BlockFormat blocks() const { return {bits, block_numel}; }
  // Elements of a shard are a multiple of this: so are its codes and its scales of 16 bytes, and
  // its bytes (quant/block_codec.h, [Note: quantised bytes]) have no padding between them.
  std::int64_t step() const { return 8 * block_numel; }
  std::int64_t rounded_up(std::int64_t numel) const {
    return (numel + step() - 1) / step() * step();
  }
  // Of tiles of about so many elements.
  std::int64_t tile(std::int64_t numel) const { return std::max(step(), numel / step() * step()); }
  bool operator==(const StoredFormat&) const = default;
};

// Bytes [offset, offset + bytes).
struct ByteSpan {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// Where what lies in the bytes of `numel` elements, a multiple of the format's step: codes, then
// scales, both in order.
class StoredBytes {
 public:
  StoredBytes(StoredFormat format, std::int64_t numel) : format_(format), numel_(numel) {}

  std::size_t bytes() const { return quant::wire_bytes(format_.blocks(), numel_); }
  // Of elements [begin, begin + numel), where begin is a multiple of a block.
  ByteSpan codes(std::int64_t begin, std::int64_t numel) const {
    return {codes_bytes(begin), codes_bytes(numel)};
  }
  ByteSpan scales(std::int64_t begin, std::int64_t numel) const {
    return {codes_bytes(numel_) + scales_bytes(begin), scales_bytes(numel)};
  }

 private:
  // The last ones may be short.
  std::size_t codes_bytes(std::int64_t numel) const {
    return static_cast<std::size_t>((numel * format_.bits + 7) / 8);
  }
  std::size_t scales_bytes(std::int64_t numel) const {
    return static_cast<std::size_t>(quant::num_blocks(format_.blocks(), numel)) *
           sizeof(std::uint16_t);
  }

  StoredFormat format_;
  std::int64_t numel_;
};

// Which parameters are stored as blocks: quant.frozen_bits and quant.frozen_names.
class StoredRule {
 public:
  StoredRule() = default;  // none is
  // Throws ConfigError for bits that are not there, and for names without bits.
  static StoredRule from(const Config& config);

  // Frozen parameters that a name of the list matches, or all if it is empty; of at least two dims
  // and one step of elements: norms and biases stay as they are.
  StoredFormat format_of(std::string_view name, bool trainable, std::int64_t numel,
                         int num_dims) const;
  // Of those that are.
  StoredFormat format() const { return format_; }
  const std::vector<std::string>& names() const { return names_; }
  // "blocks.*": a * stands for any run of characters.
  static bool matches(std::string_view pattern, std::string_view name);

 private:
  StoredFormat format_;
  std::vector<std::string> names_;
};

// "int4 blocks of 128"
std::string describe(StoredFormat format);

}  // namespace tessera::shard
