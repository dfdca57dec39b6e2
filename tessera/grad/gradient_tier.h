// Which gradient shards do not stay in memory: where in a store they accumulate, and through which
// buffers they get there. Pure data.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/store.h"

namespace tessera::grad {

struct GradientTier {
  // Both outlive the reducer.
  tier::Store* store = nullptr;
  tier::BufferPool* buffers = nullptr;
  // By parameter id: offset in the store of whole_blocks(4 * shard_numel) bytes; -1: in memory.
  std::vector<std::int64_t> offset;

  bool stores(int id) const {
    const auto i = static_cast<std::size_t>(id);
    return i < offset.size() && offset[i] >= 0;
  }
};

}  // namespace tessera::grad
