// Which gradient shards do not stay in memory: where in a store they accumulate, and through which
// buffers they get there. Pure data.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/store.h"

namespace tessera::grad {

// Shards that are larger pass through `buffers` in tiles of at least this.
inline constexpr std::size_t kSmallestPoolBytes = kPieceStep * sizeof(float);

struct GradientTier {
  // Both outlive the reducer; null if nothing is stored. The buffers are in memory of the host, and
  // the reducer's alone.
  tier::Store* store = nullptr;
  tier::BufferPool* buffers = nullptr;
  // The same parameters on every rank. By parameter id: offset in the store of whole_blocks(4 *
  // shard_numel) bytes; -1: in memory.
  std::vector<std::int64_t> offset;

  bool stores(int id) const {
    const auto i = static_cast<std::size_t>(id);
    return i < offset.size() && offset[i] >= 0;
  }
};

}  // namespace tessera::grad
