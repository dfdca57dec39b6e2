// How much staging a call of a Group takes, before the call is made: to the byte, and rounded as a
// reserved region gives it out. Group asks these same functions, so a plan that is made of them
// holds (Group::reserve_staging).
//
// A call whose memory the network cannot reach passes through copies in host memory, which are
// staging, too. Calls that are not named here (barrier) take none.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/device/arena_map.h"

namespace tessera::comm {

// Up to this many bytes from all ranks together, an all-reduce gathers everything and adds at home:
// one round trip instead of two, and the same bits.
inline constexpr std::size_t kSmallAllReduceBytes = std::size_t{64} * 1024;

// Where the memory is that calls are given.
enum class CallMemory : std::uint8_t {
  kReached,  // the network reads and writes it
  kCopied,   // it is a device's, and the network reaches the host's only
};

constexpr std::size_t staging_room(std::size_t bytes) { return device::round_to_arena(bytes); }

// Small pieces of a gather travel together in one message, a pack.
constexpr bool is_small_piece(std::size_t shard_bytes, std::size_t pack_below_bytes) {
  return shard_bytes > 0 && shard_bytes < pack_below_bytes;
}
// By piece. One small piece alone saves nothing by a copy, so it is not packed.
std::vector<bool> packed_pieces(std::span<const std::size_t> shard_bytes,
                                std::size_t pack_below_bytes);
// What a piece takes in a pack.
std::size_t packed_bytes(std::size_t shard_bytes);

// REQUIRES of all below: at least one rank, no negative number of elements.
std::size_t all_gather_staging_bytes(std::span<const std::size_t> shard_bytes,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);

struct GatherToStaging {
  int num_ranks = 1;
  int num_wanting = 1;   // ranks that get it
  bool receives = true;  // this rank does
  bool copies = true;    // Backend::gather_to_needs_copies()
  CallMemory memory = CallMemory::kReached;
};
std::size_t gather_to_staging_bytes(std::span<const std::size_t> shard_bytes,
                                    std::size_t pack_below_bytes, const GatherToStaging& call);

std::size_t reduce_scatter_staging_bytes(std::int64_t shard_numel, DType dtype, int num_ranks,
                                         CallMemory memory = CallMemory::kReached);
std::size_t all_reduce_staging_bytes(std::int64_t numel, DType dtype, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);
std::size_t broadcast_staging_bytes(std::size_t bytes, CallMemory memory);
std::size_t all_to_all_staging_bytes(std::size_t piece_bytes, int num_ranks, CallMemory memory);

}  // namespace tessera::comm
