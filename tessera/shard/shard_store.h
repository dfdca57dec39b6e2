// Parameter shards that live on NVMe: where each one is, and which of its writes are still under
// way.
//
// Words are addressed in the shard: [begin, begin + numel), where begin is a multiple of
// kShardStep. They are elements, or, where a shard is stored as blocks of integers, words of its
// bytes: Layout::stored_dtype(). A read or write covers whole blocks: memory must have room for
// numel rounded up to kShardStep; what is behind the shard's end is padding.
//
// Threads: every method may be called from any thread but add() and forget(), which are called
// between steps.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "tessera/shard/param.h"
#include "tessera/tier/store.h"

namespace tessera::shard {

// A block of bf16: pieces that begin at its multiples are whole blocks in every type.
inline constexpr std::int64_t kShardStep = 2048;  // words

class ShardStore {
 public:
  // `store` outlives it.
  explicit ShardStore(tier::Store& store) : store_(store) {}

  // An extent for the shard of this parameter.
  void add(const Param& param);
  // It lives in memory from now on; its extent stays unused.
  void forget(int id);
  bool has(int id) const;
  std::int64_t offset(int id) const;  // in the store
  tier::Store& store() { return store_; }

  device::Pending start_read(const Param& param, std::int64_t begin, std::int64_t numel, void* to);
  device::Pending start_write(const Param& param, std::int64_t begin, std::int64_t numel,
                              const void* from);
  // Blocks until the writes of this shard that were started so far are done; throws what went
  // wrong.
  void wait_written(int id);
  // Whether wait_written() would neither block nor throw.
  bool is_written(int id);

 private:
  void forget_done(std::vector<device::Pending>& writes);
  tier::Store& store_;
  std::vector<std::int64_t> offsets_;  // by id; -1: not here
  std::mutex mutex_;
  std::map<int, std::vector<device::Pending>> writes_;  // guarded by mutex_
};

// Words of this rank's shard, wherever it is, to memory of the host with room as above. `store`
// may be null where nothing is on NVMe. Blocks until writes of the shard that were started are
// done. From any thread. REQUIRES: whoever changes the shard is ordered behind it.
device::Pending start_read_shard(const Param& param, ShardStore* store, std::int64_t begin,
                                 std::int64_t numel, std::byte* to);

}  // namespace tessera::shard
