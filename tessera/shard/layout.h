// How one parameter is cut: elements of its storage, in memory order, into equal pieces per rank.
//
//   full      |  rank 0  |  rank 1  |  rank 2  |      padded_numel = num_ranks * shard_numel
//   elements  |..........|..........|....000000|      numel of them are the parameter's
//
// Invariants:
//  (1) Every rank's piece has shard_numel elements, a multiple of 16 bytes, so that a piece is
//      aligned wherever it lies in the full parameter. Padding is zero.
//  (2) shard_numel is the smallest such number: ceil(numel / num_ranks), rounded up.
//  (3) A parameter without elements has pieces without elements.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/core/dtype.h"

namespace tessera::shard {

inline constexpr std::size_t kShardAlignment = 16;  // bytes

// Elements of the full parameter; padding is not in it.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

class Layout {
 public:
  Layout() = default;
  // Throws ConfigError for a negative numel or fewer than one rank.
  Layout(std::int64_t numel, int num_ranks, DType dtype);

  std::int64_t numel() const { return numel_; }
  int num_ranks() const { return num_ranks_; }
  DType dtype() const { return dtype_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  std::int64_t padded_numel() const { return shard_numel_ * num_ranks_; }
  std::size_t shard_bytes() const {
    return static_cast<std::size_t>(shard_numel_) * bytes_of(dtype_);
  }
  std::size_t full_bytes() const {
    return static_cast<std::size_t>(padded_numel()) * bytes_of(dtype_);
  }
  // What of the parameter lies in this rank's piece; empty where the piece is all padding.
  ElementRange range(int rank) const;

 private:
  std::int64_t numel_ = 0;
  int num_ranks_ = 1;
  DType dtype_ = DType::kFloat32;
  std::int64_t shard_numel_ = 0;
};

}  // namespace tessera::shard
