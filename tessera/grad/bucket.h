// Which gradient travels in which bucket, at which offset, and in which order buckets are reduced.
// Pure, and a function of the registration order alone: the same on every rank.
//
// Buckets are filled in the reverse of the registration order, which is about the order in which
// backward produces gradients. A parameter of at least half a bucket travels alone: such a gradient
// can be reduced from where it lies, without a copy. One that is larger than a bucket travels in
// several, so that no bucket is larger than asked for; it is cut at multiples of kPieceStep where a
// bucket holds as many elements. Smaller ones share buckets, past those that travel alone, and are
// never cut. Buckets are reduced in the order in which they become full if gradients are added in
// reverse registration order.
//
//   bucket on the wire:  | for rank 0: piece a, piece b | for rank 1: piece a, piece b | ...
//   where piece p of rank r holds elements [r*shard_numel + begin, + numel) of its parameter
//
// Where buckets travel as blocks of integers (reducer.h, [Note: quantised reductions]), every piece
// begins at a multiple of a block, and zeros fill what its last block leaves: so a block's elements
// are of one parameter, and the same ones in whatever bucket they travel.
//
// The reduced shards that stay on the device lie in one region, in bucket order: a bucket's result
// can be written where it stays. Those in host memory and on NVMe are not in it. Dynamic parameters
// are in no bucket, since nobody knows whether anyone uses them; their shards follow, in reverse
// registration order as well, so that the parameters of one unit are neighbours.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::grad {

// Elements. The blocks of optim's sum of squares (kNormBlock), and whole blocks of NVMe: pieces
// of shards on NVMe begin at multiples of it.
inline constexpr std::int64_t kPieceStep = 4096;
// Gradients on NVMe pass through buffers in tiles of at least this.
inline constexpr std::size_t kSmallestPoolBytes = kPieceStep * sizeof(float);

struct BucketParam {
  int id = 0;
  std::int64_t shard_numel = 0;
  bool dynamic = false;
  Tier home = Tier::kDevice;  // of the shard's gradient; the same on every rank
};

struct Piece {
  int param = 0;                   // id
  std::int64_t shard_begin = 0;    // in the shard of the parameter
  std::int64_t numel = 0;          // per rank
  std::int64_t bucket_offset = 0;  // in each rank's part of the bucket
  std::int64_t padding = 0;        // zeros behind it, in the bucket and in the region
};

struct Bucket {
  std::vector<Piece> pieces;
  std::int64_t shard_numel = 0;    // per rank, with padding
  std::int64_t region_offset = 0;  // of its pieces that are in the region, behind each other
};

struct BucketSizes {
  std::int64_t num_buckets = 0;
  std::int64_t largest_shard_numel = 0;  // of a bucket
  std::int64_t region_numel = 0;
  std::int64_t bucketed_numel = 0;  // of the region; dynamic parameters have the rest
  // No bucket is larger that plan_buckets makes of a choice of the dynamic parameters alone.
  std::int64_t largest_dynamic_numel = 0;
};

struct BucketLayout : BucketSizes {
  std::vector<Bucket> buckets;  // in the order of their reduction
  std::vector<std::int64_t>
      region_offset;  // by id: where the parameter's shard gradient begins; -1: not there
  std::vector<std::optional<Tier>> home;  // by id, as long; nothing: not one of `params`
  std::vector<bool> is_dynamic;           // by id, as long
};

// `params`: trainable ones in registration order. `bucket_bytes`: most bytes of one bucket, of all
// ranks together, in elements of `wire_bytes_per_element`; every bucket has at least one block of
// `block_numel` per rank, and one of a parameter on NVMe that is cut at least kPieceStep, which is
// a multiple of blocks. A parameter's pieces are contiguous in the region.
BucketLayout plan_buckets(std::span<const BucketParam> params, int num_ranks,
                          std::int64_t bucket_bytes, std::size_t wire_bytes_per_element,
                          std::int64_t block_numel = 1);
// Of that layout, without making it: one of a model that no machine holds, in buckets as small as
// they get, has a hundred million pieces.
BucketSizes bucket_sizes(std::span<const BucketParam> params, int num_ranks,
                         std::int64_t bucket_bytes, std::size_t wire_bytes_per_element,
                         std::int64_t block_numel = 1);

}  // namespace tessera::grad
