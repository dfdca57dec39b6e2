#include "tessera/checkpoint/stored_blocks.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::checkpoint {

std::vector<ContentPiece> content_pieces(shard::StoredFormat format, std::int64_t tensor_numel,
                                         const shard::StoredBytes& places, std::int64_t begin,
                                         std::int64_t numel) {
  TESSERA_INVARIANT(begin % format.step() == 0, "element ", begin, " begins no step of ",
                    format.step());
  if (numel == 0) {
    return {};
  }
  const shard::StoredBytes whole(format, format.rounded_up(tensor_numel));
  const std::size_t all_codes = (whole.codes(0, tensor_numel).bytes + kContentWordBytes - 1) /
                                kContentWordBytes * kContentWordBytes;
  const shard::ByteSpan codes = places.codes(0, numel);
  const shard::ByteSpan scales = places.scales(0, numel);
  return {{codes.offset, codes.bytes, whole.codes(begin, numel).offset},
          {scales.offset, scales.bytes,
           all_codes + whole.scales(begin, numel).offset - whole.scales(0, 0).offset}};
}

void ContentSum::add(std::span<const std::byte> bytes) {
  const std::uint64_t end = position_ + bytes.size();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const ContentPiece& piece = pieces_[i];
    const std::uint64_t first = std::max(position_, piece.begin);
    const std::uint64_t last = std::min(end, piece.begin + piece.bytes);
    if (first >= last) {
      continue;
    }
    if (hashes_.size() == i) {
      hashes_.emplace_back(piece.content_begin);
    }
    hashes_[i].add(bytes.subspan(first - position_, last - first));
  }
  position_ = end;
}

std::uint64_t ContentSum::value() const {
  std::uint64_t sum = 0;
  for (const ContentHash& hash : hashes_) {
    sum += hash.value();
  }
  return sum;
}

}  // namespace tessera::checkpoint
