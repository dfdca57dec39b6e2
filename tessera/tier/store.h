// Where bytes of shards live between their uses: device, host or NVMe, behind one contract.
//
// A store is a range of bytes that grows by allocate(). Memory stores hand out the bytes
// themselves, so that nothing is copied where they can be worked on in place; others are read and
// written in whole blocks. Whoever can work on either asks data() first.
//
// Order: overlapping transfers, of which one is a write, are undefined; the caller orders them.
//
// Threads: start_read() and start_write() from any thread; allocate() from one, not at the same
// time as anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/ledger.h"
#include "tessera/tier/io_engine.h"

namespace tessera::tier {

// A piece of a store with its owner, for errors and for people.
struct StoreExtent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::string name;  // "exp_avg of parameter 'h.0.attn.weight'"
};

// Of ranges that were started; whole blocks, as they are transferred.
struct StoreStats {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
};

class Store {
 public:
  virtual ~Store() = default;
  virtual Tier tier() const = 0;
  // Room for `bytes`, rounded up to whole blocks, behind everything so far; its offset. Contents
  // are zero. May move data() of a memory store.
  virtual std::uint64_t allocate(std::size_t bytes, std::string name) = 0;
  virtual std::uint64_t bytes() const = 0;
  virtual const std::vector<StoreExtent>& extents() const = 0;  // in order
  // Null: bytes must be read and written.
  virtual std::byte* data() = 0;
  // Whole blocks; memory aligned to kBlockBytes. Ranges may lie over several extents. Failures are
  // IoErrors with path, offset and the names of the extents concerned; CorruptErrors where
  // checksums are verified and differ.
  virtual Pending start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) = 0;
  virtual Pending start_write(std::uint64_t offset, const std::byte* from, std::size_t bytes) = 0;
  virtual StoreStats stats() const = 0;
};

// InternalError unless a range of whole blocks inside the store and block-aligned memory are given.
void check_store_range(const Store& store, std::uint64_t offset, const void* memory,
                       std::size_t bytes);

// The extent that holds this byte. REQUIRES: there is one.
const StoreExtent& extent_at(const std::vector<StoreExtent>& extents, std::uint64_t offset);

// For errors: the name of the extent, or of the first and the last where there are several.
std::string names_in(const std::vector<StoreExtent>& extents, std::uint64_t offset,
                     std::size_t bytes);

}  // namespace tessera::tier
