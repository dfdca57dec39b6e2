// Frozen weights that are stored as blocks of integers with scales (quant/block_codec.h): how their
// bytes lie in a shard, and which parameters are stored so.
//
// Invariants:
//  (1) A shard of such a parameter begins at a multiple of kEncodedStep elements: its blocks are
//      those of the whole parameter, on any number of ranks, so that bytes can be cut anew exactly.
//  (2) What is stored follows from option, name, shape and trainability as it was registered: the
//      same on all ranks, in a plan and in an engine.
//
// Threads: plain data; const methods from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::shard {

// Elements that share a scale.
inline constexpr std::int64_t kEncodedBlock = 128;
// Elements of a shard are a multiple of this: so are its codes and its scales of 16 bytes, and a
// wire has no padding.
inline constexpr std::int64_t kEncodedStep = 1024;
inline constexpr std::int64_t kScaleBytes = 2;

// How the elements of a parameter are stored.
struct StoredFormat {
  int bits = 0;  // of an integer: 4 or 8; 0: elements are stored as they are

  bool is_encoded() const { return bits != 0; }
  bool operator==(const StoredFormat&) const = default;
};

// Bytes [offset, offset + bytes).
struct ByteSpan {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// The bytes of `numel` elements, a multiple of kEncodedStep: codes, then scales, both in order.
class StoredBytes {
 public:
  StoredBytes(StoredFormat format, std::int64_t numel) : format_(format), numel_(numel) {}

  std::size_t bytes() const { return codes_bytes(numel_) + scales_bytes(numel_); }
  // Of elements [begin, begin + numel), where begin is a multiple of kEncodedBlock.
  ByteSpan codes(std::int64_t begin, std::int64_t numel) const {
    return {codes_bytes(begin), codes_bytes(numel)};
  }
  ByteSpan scales(std::int64_t begin, std::int64_t numel) const {
    return {codes_bytes(numel_) + scales_bytes(begin), scales_bytes(numel)};
  }

 private:
  std::size_t codes_bytes(std::int64_t numel) const {
    return static_cast<std::size_t>((numel * format_.bits + 7) / 8);
  }
  static std::size_t scales_bytes(std::int64_t numel) {
    return static_cast<std::size_t>((numel + kEncodedBlock - 1) / kEncodedBlock * kScaleBytes);
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
  // and kEncodedStep elements: norms and biases stay as they are.
  StoredFormat format_of(std::string_view name, bool trainable, std::int64_t numel,
                         int num_dims) const;
  int bits() const { return bits_; }
  const std::vector<std::string>& names() const { return names_; }
  // "blocks.*": a * stands for any run of characters.
  static bool matches(std::string_view pattern, std::string_view name);

 private:
  int bits_ = 0;
  std::vector<std::string> names_;
};

// Blocks say so themselves: "int4 blocks of 128".
std::string describe(StoredFormat format);

}  // namespace tessera::shard
