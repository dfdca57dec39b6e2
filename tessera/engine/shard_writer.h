// Internal to engine: new values for one parameter's shard, wherever that lives and however it is
// stored. Elements are written as they come. A shard that is stored as blocks is put together in
// host memory, encoded tile by tile, and moved to its place by finish().
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/engine/engine_context.h"
#include "tessera/shard/stored_shard.h"

namespace tessera::engine {

class ShardWriter {
 public:
  // What the shard has, where only some of it changes: blocks whose elements are written as they
  // are keep their bytes.
  enum class Before : std::uint8_t { kReplaced, kKept };
  ShardWriter(EngineContext& context, const shard::Param& param, Before before = Before::kReplaced);

  // Elements [begin, begin + numel) of the shard, on the host or the device; begin is a multiple
  // of tile(1), and so is the end unless it is that of the parameter's range.
  void write(std::int64_t begin, std::int64_t numel, const void* elements);
  // The bytes of a shard that is stored as blocks, in place of write().
  shard::StoredShard& stored() { return *stored_; }
  // REQUIRES: all that changes has been written.
  void finish();
  // Elements of a tile, of about so many.
  std::int64_t tile(std::int64_t numel) const;

 private:
  void put(std::int64_t begin, std::int64_t numel, DType dtype, const void* words);

  EngineContext& ctx_;
  const shard::Param& param_;
  const Before before_;
  std::optional<shard::StoredShard> stored_;  // null: elements are stored
};

}  // namespace tessera::engine
