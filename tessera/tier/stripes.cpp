#include "tessera/tier/stripes.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::tier {

Stripes::Stripes(std::size_t num_files, std::uint64_t stripe_bytes)
    : num_files_(num_files), stripe_bytes_(stripe_bytes) {
  TESSERA_INVARIANT(num_files > 0 && stripe_bytes > 0, num_files, " files with stripes of ",
                    stripe_bytes, " bytes");
}

std::vector<Stripes::Piece> Stripes::cut(std::uint64_t offset, std::size_t bytes) const {
  if (num_files_ == 1) {
    return bytes > 0 ? std::vector<Piece>{{0, offset, offset, bytes}} : std::vector<Piece>();
  }
  std::vector<Piece> pieces;
  for (const std::uint64_t end = offset + bytes; offset < end;) {
    const std::uint64_t stripe = offset / stripe_bytes_;
    const std::uint64_t inside = offset % stripe_bytes_;
    const std::uint64_t piece_bytes = std::min(stripe_bytes_ - inside, end - offset);
    pieces.push_back({static_cast<std::size_t>(stripe % num_files_),
                      stripe / num_files_ * stripe_bytes_ + inside, offset,
                      static_cast<std::size_t>(piece_bytes)});
    offset += piece_bytes;
  }
  return pieces;
}

std::uint64_t Stripes::file_bytes(std::size_t file, std::uint64_t store_bytes) const {
  const std::uint64_t whole = store_bytes / stripe_bytes_;  // stripes
  const std::uint64_t rounds = whole / num_files_;
  const std::uint64_t last = whole % num_files_;  // the file whose turn it is
  const std::uint64_t more = file < last    ? stripe_bytes_
                             : file == last ? store_bytes % stripe_bytes_
                                            : 0;
  return rounds * stripe_bytes_ + more;
}

}  // namespace tessera::tier
