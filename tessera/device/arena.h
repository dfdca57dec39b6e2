// One region of device memory for everything that is gathered: what gathering costs is a constant
// that a user can read off. Which bytes go where is decided in arena_map.h; this half owns the
// memory and the order of its reuse.
//
// A released block names the work after which its bytes may be written again. A later block over
// those bytes makes its stream wait for that work; the host never waits:
//
//   ArenaBlock block = arena.allocate(bytes, gather);   // gather is ordered behind former users
//   ... gather writes block.data; compute reads it ...
//   arena.release(std::move(block), compute.record());
//
// A block that does not fit is allocated from the device, outside the region; the block says so and
// the statistics count it.
//
// Threads: one caller at a time. The destructor waits for the released work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "tessera/device/arena_map.h"
#include "tessera/device/device.h"

namespace tessera::device {

// Must go back to its arena with release(); it may be moved freely until then.
struct ArenaBlock {
  std::byte* data = nullptr;  // aligned to kArenaAlignment; null for zero bytes
  std::size_t bytes = 0;      // as asked for
  Extent extent;              // inside the region; empty for an overflow
  bool is_overflow = false;
  Pending ready;  // the former users' work, as seen by the stream given to allocate()
};

struct ArenaStats {
  ArenaMapStats region;
  std::size_t num_overflows = 0;   // ever
  std::size_t overflow_bytes = 0;  // held now, also those whose last use is not done
  std::size_t peak_overflow_bytes = 0;
};

class Arena {
 public:
  // The region is taken at once. `device` must outlive the arena.
  Arena(Device& device, std::size_t capacity_bytes, Role role = Role::kFull);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Best fit, else an overflow. `stream` is the one that writes the block first; other streams
  // that use it must be ordered behind that one.
  [[nodiscard]] ArenaBlock allocate(std::size_t bytes, Stream& stream);
  // At a planned offset. Throws InternalError if a block is there: see can_allocate_at().
  [[nodiscard]] ArenaBlock allocate_at(std::size_t offset, std::size_t bytes, Stream& stream);
  bool can_allocate_at(std::size_t offset, std::size_t bytes) const {
    return map_.can_claim(offset, bytes);
  }
  // The block's bytes may be reused after `last_use`. If that fails, the stream of the next block
  // over these bytes fails with it.
  void release(ArenaBlock block, Pending last_use);

  ArenaStats stats() const;
  void reset_peaks();

 private:
  // Work that must be done before bytes are written again. Fences never overlap.
  struct Fence {
    std::size_t bytes = 0;
    Pending pending;
  };
  struct Retired {
    Memory memory;
    Pending last_use;
  };

  ArenaBlock hand_out(const Extent& extent, std::size_t bytes, Stream& stream);
  ArenaBlock overflow(std::size_t bytes);
  // Removes the fences over the extent and lets the stream wait for them; false if there are none.
  bool wait_for_fences(const Extent& extent, Stream& stream);
  void free_retired();

  Device& device_;
  const Role role_;
  Memory region_;
  ArenaMap map_;
  std::map<std::size_t, Fence> fences_;  // by offset
  std::map<std::byte*, Memory> overflows_;
  std::vector<Retired> retired_;
  std::size_t num_overflows_ = 0;
  std::size_t overflow_bytes_ = 0;
  std::size_t peak_overflow_bytes_ = 0;
};

}  // namespace tessera::device
