// How one parameter is cut: elements of its storage, in memory order, into equal pieces per rank.
//
//   full      |  rank 0  |  rank 1  |  rank 2  |      padded_numel = num_ranks * shard_numel
//   elements  |..........|..........|....000000|      numel of them are the parameter's
//
// Invariants:
//  (1) Every rank's piece has shard_numel elements, a multiple of 16 bytes, so that a piece is
//      aligned wherever it lies in the full parameter; of a parameter that is stored as blocks, a
//      multiple of StoredFormat::step() elements. Padding is zero.
//  (2) shard_numel is the smallest such number: ceil(numel / num_ranks), rounded up.
//  (3) A parameter without elements has pieces without elements.
//  (4) A piece is stored as its elements, or as blocks (stored_format.h): whoever keeps, moves or
//      reads shards counts stored bytes, as stored_numel() words of stored_dtype(). Whoever
//      gathers gets elements.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/core/dtype.h"
#include "tessera/core/placement.h"
#include "tessera/shard/stored_format.h"

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
  Layout(std::int64_t numel, int num_ranks, DType dtype, StoredFormat format = {});

  std::int64_t numel() const { return numel_; }
  int num_ranks() const { return num_ranks_; }
  DType dtype() const { return dtype_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  std::int64_t padded_numel() const { return shard_numel_ * num_ranks_; }
  StoredFormat format() const { return format_; }
  bool is_encoded() const { return format_.is_encoded(); }
  // Of a piece, as it is stored.
  std::size_t shard_bytes() const {
    return is_encoded() ? StoredBytes(format_, shard_numel_).bytes()
                        : static_cast<std::size_t>(shard_numel_) * bytes_of(dtype_);
  }
  DType stored_dtype() const { return is_encoded() ? DType::kInt32 : dtype_; }
  std::int64_t stored_numel() const {
    return static_cast<std::int64_t>(shard_bytes() / bytes_of(stored_dtype()));
  }
  std::size_t full_bytes() const {
    return static_cast<std::size_t>(padded_numel()) * bytes_of(dtype_);
  }
  // Of memory to gather to, and where in it this rank's piece is loaded first, unless it is in
  // memory of the device: into its own slot, or behind the full parameter if it must be decoded.
  std::size_t gathered_bytes(Tier tier) const {
    return full_bytes() + (is_encoded() && tier != Tier::kDevice ? shard_bytes() : 0);
  }
  std::size_t load_offset(int rank) const {
    return is_encoded() ? full_bytes() : static_cast<std::size_t>(rank) * shard_bytes();
  }
  // What of the parameter lies in this rank's piece; empty where the piece is all padding.
  ElementRange range(int rank) const;

 private:
  std::int64_t numel_ = 0;
  int num_ranks_ = 1;
  DType dtype_ = DType::kFloat32;
  StoredFormat format_;
  std::int64_t shard_numel_ = 0;
};

}  // namespace tessera::shard
