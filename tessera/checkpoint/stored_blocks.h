// Where the bytes of a fragment stand in the run of bytes that a tensor's content hash is of
// (docs/formats.md): of elements in their order; of a tensor that is stored as blocks, all codes
// and then all scales, so that the hash does not depend on how the tensor is cut.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

// Bytes [begin, begin + bytes) of something, which stand at `content_begin` in that run: both are
// multiples of 8. What is in no piece is not hashed.
struct ContentPiece {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t content_begin = 0;
};

// Of the bytes of elements [begin, begin + numel) of a tensor of `tensor_numel`, as `places` says
// that they lie. REQUIRES: begin is a multiple of the format's step.
std::vector<ContentPiece> content_pieces(shard::StoredFormat format, std::int64_t tensor_numel,
                                         const shard::StoredBytes& places, std::int64_t begin,
                                         std::int64_t numel);

// The content hash of bytes that come in their order.
class ContentSum {
 public:
  explicit ContentSum(std::vector<ContentPiece> pieces) : pieces_(std::move(pieces)) {}
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  const std::vector<ContentPiece> pieces_;
  std::vector<ContentHash> hashes_;  // of pieces that have begun
  std::uint64_t position_ = 0;
};

}  // namespace tessera::checkpoint
