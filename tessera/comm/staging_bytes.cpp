#include "tessera/comm/staging_bytes.h"

#include <algorithm>

namespace tessera::comm {
namespace {

constexpr std::size_t kPackAlignment = 16;

// Of one rank's pieces: in the pack, and by themselves.
struct Pieces {
  std::size_t packed = 0;
  std::size_t direct = 0;
};

Pieces add_up(std::span<const std::size_t> shard_bytes, std::size_t pack_below_bytes) {
  const std::vector<bool> is_packed = packed_pieces(shard_bytes, pack_below_bytes);
  Pieces pieces;
  for (std::size_t i = 0; i < shard_bytes.size(); ++i) {
    if (is_packed[i]) {
      pieces.packed += packed_bytes(shard_bytes[i]);
    } else {
      pieces.direct += shard_bytes[i];
    }
  }
  return pieces;
}

// Copies of what travels by itself, `num_pieces` pieces of each.
std::size_t copied_bytes(std::span<const std::size_t> shard_bytes, std::size_t pack_below_bytes,
                         std::size_t num_pieces, CallMemory memory) {
  if (memory == CallMemory::kReached) {
    return 0;
  }
  const std::vector<bool> is_packed = packed_pieces(shard_bytes, pack_below_bytes);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < shard_bytes.size(); ++i) {
    bytes += is_packed[i] ? 0 : staging_room(shard_bytes[i] * num_pieces);
  }
  return bytes;
}

}  // namespace

std::vector<bool> packed_pieces(std::span<const std::size_t> shard_bytes,
                                std::size_t pack_below_bytes) {
  std::vector<bool> is_packed(shard_bytes.size());
  std::transform(shard_bytes.begin(), shard_bytes.end(), is_packed.begin(),
                 [&](std::size_t bytes) { return is_small_piece(bytes, pack_below_bytes); });
  if (std::count(is_packed.begin(), is_packed.end(), true) == 1) {
    is_packed.assign(is_packed.size(), false);
  }
  return is_packed;
}

std::size_t packed_bytes(std::size_t shard_bytes) {
  return (shard_bytes + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
}

std::size_t all_gather_staging_bytes(std::span<const std::size_t> shard_bytes,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  return staging_room(add_up(shard_bytes, pack_below_bytes).packed * ranks) +
         copied_bytes(shard_bytes, pack_below_bytes, ranks, memory);
}

std::size_t gather_to_staging_bytes(std::span<const std::size_t> shard_bytes,
                                    std::size_t pack_below_bytes, const GatherToStaging& call) {
  if (call.num_wanting == 0) {
    return 0;
  }
  const Pieces pieces = add_up(shard_bytes, pack_below_bytes);
  const auto num_pieces = static_cast<std::size_t>(call.receives ? call.num_ranks : 1);
  const std::size_t pack = pieces.packed * num_pieces;
  const std::size_t copies =
      call.copies ? (pieces.packed + pieces.direct) * static_cast<std::size_t>(call.num_wanting)
                  : 0;
  return staging_room(pack) + staging_room(copies) +
         copied_bytes(shard_bytes, pack_below_bytes, num_pieces, call.memory);
}

std::size_t reduce_scatter_staging_bytes(std::int64_t shard_numel, DType dtype, int num_ranks,
                                         CallMemory memory) {
  if (num_ranks == 1) {
    return 0;
  }
  const auto numel = static_cast<std::size_t>(shard_numel);
  const std::size_t all =
      staging_room(numel * bytes_of(dtype) * static_cast<std::size_t>(num_ranks));
  // What is received; and the copies of what is sent and of the sum, in the wider type it may have.
  return memory == CallMemory::kReached
             ? all
             : 2 * all + staging_room(numel * std::max(bytes_of(dtype), sizeof(float)));
}

std::size_t all_reduce_staging_bytes(std::int64_t numel, DType dtype, int num_ranks,
                                     CallMemory memory) {
  if (num_ranks == 1) {
    return 0;
  }
  const bool is_copied = memory == CallMemory::kCopied;
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const std::size_t bytes = static_cast<std::size_t>(numel) * bytes_of(dtype);
  if (bytes * ranks <= kSmallAllReduceBytes) {
    return staging_room(bytes * ranks) + (is_copied ? staging_room(bytes) : 0);
  }
  // What is received, and, where `num_ranks` does not divide, a copy with equal pieces.
  const std::size_t count = (static_cast<std::size_t>(numel) + ranks - 1) / ranks;
  const std::size_t padded = count * bytes_of(dtype) * ranks;
  return (is_copied || padded > bytes ? 2 : 1) * staging_room(padded);
}

std::size_t broadcast_staging_bytes(std::size_t bytes, CallMemory memory) {
  return memory == CallMemory::kReached ? 0 : staging_room(bytes);
}

std::size_t all_to_all_staging_bytes(std::size_t piece_bytes, int num_ranks, CallMemory memory) {
  return memory == CallMemory::kReached
             ? 0
             : 2 * staging_room(piece_bytes * static_cast<std::size_t>(num_ranks));
}

}  // namespace tessera::comm
