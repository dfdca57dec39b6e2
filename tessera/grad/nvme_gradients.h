// Internal to grad: shards of gradients that accumulate on NVMe.
//
// A piece is written in tiles, each in a separate lease: values are copied into the lease, or added
// to data read into it, and the lease is written. So a piece of any size passes through a pool of
// kSmallestPoolBytes, and no copy of a shard is held. More leases allow more tiles in flight: reads
// run ahead of sums as far as leases are free, and writes are not waited for. The sums of squares
// of each tile's blocks are kept for the norm, so gradients are not read again for it.
//
// Nothing else uses the pool: a lease whose write is done is released at the next call. Waiting for
// a lease is waiting for the oldest write, that is for the disk, never for a rank.
//
// Values in memory of a discrete device are copied D2H on the way, tile by tile, into a lease that
// is kept for that: one tile is on its way while the one before it is added up. So they take no
// more of the host than the pool.
//
// Invariants:
//  (1) Tiles begin at multiples of kPieceStep and are whole blocks on NVMe; after the shard's
//      end they are zero.
//  (2) Work that overlaps a write in flight waits for it: sums are made in the order of put(), and
//      get() reads what was put before it.
//  (3) A block that was not put since clear() counts as zeros, and is not read.
//  (4) The first failure is kept until clear(). Nothing is put after it.
//
// Threads: put() and get() on the reduce stream's, one at a time; beside a discrete device, whose
// streams must not wait for a disk, on one that GradientStream has for it. wait() and clear() when
// all of that is done. stats and start_read() from any, the latter after wait() and before clear().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <optional>
#include <span>
#include <vector>

#include "tessera/grad/reducer.h"

namespace tessera::grad {

// A piece of a shard on NVMe. Begins at a multiple of kPieceStep, and ends at a multiple, at the
// end of the shard, or where its padding begins.
struct ShardPiece {
  int param = 0;
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

class NvmeGradients {
 public:
  // REQUIRES: parts.nvme has a store and buffers, pinned beside a discrete device. Throws
  // ConfigError if the pool is too small.
  explicit NvmeGradients(const ReducerParts& parts);
  ~NvmeGradients();
  NvmeGradients(const NvmeGradients&) = delete;
  NvmeGradients& operator=(const NvmeGradients&) = delete;

  // Sets the piece to `values`, or adds them to it in fp32. Blocks until leases are free, and for
  // reads of what it adds to; `values` are not needed afterwards. A failure is kept for wait().
  void put(const ShardPiece& piece, const void* values, DType dtype, bool adds) noexcept;
  // to[i] = the stored value, as `dtype`; zeros where nothing was put. Blocks for the disk. After a
  // failure, which is kept for wait(), `to` is undefined.
  void get(const ShardPiece& piece, void* to, DType dtype) noexcept;
  // Blocks until everything is written; throws the first failure, with the parameter's name.
  void wait();
  // Waits for transfers in flight, ignoring failures; drops all values.
  void clear() noexcept;

  double sum_of_squares(int id) const;
  device::Pending start_read(int id, std::int64_t begin, std::int64_t numel, float* to);

  // Adds what was moved, and how long put() and wait() had to wait, since the last call.
  void take_stats(ReducerStats& stats);

 private:
  struct Tile {
    ShardPiece at;
    tier::Lease lease;
    device::Pending moved;  // read into the lease, or written from it

    float* data() const { return reinterpret_cast<float*>(lease.data()); }
  };

  // The tiles of a piece, where the host reads them.
  class HostValues {
   public:
    HostValues(NvmeGradients& gradients, const ShardPiece& piece, const void* values, DType dtype);
    ~HostValues();
    HostValues(const HostValues&) = delete;
    HostValues& operator=(const HostValues&) = delete;

    // Until the next call. REQUIRES: tiles in order, each once.
    const void* next();

   private:
    void start_copy();  // of the tile behind those that were started; nothing behind the last

    NvmeGradients& gradients_;
    const ShardPiece piece_;
    const std::byte* const values_;
    const DType dtype_;
    std::int64_t num_given_ = 0;    // elements
    std::int64_t num_started_ = 0;  // whose copies are
    device::Pending copied_;        // the last of them
  };
  void replace(const ShardPiece& piece, const void* values, DType dtype);
  void add(const ShardPiece& piece, const void* values, DType dtype);
  void allocate_staging();
  std::byte* staging(std::int64_t tile) const;  // of tiles in turn
  // Reads ahead as far as leases are free, and gives `use` the tiles in order.
  void read_tiles(const ShardPiece& piece, const std::function<void(Tile)>& use);
  ShardPiece tile_at(const ShardPiece& piece, std::int64_t offset) const;
  void allocate_extents();
  std::uint64_t offset_of(const ShardPiece& at) const;
  std::span<double> blocks_of(int id) const;
  bool is_empty(int id, std::int64_t begin) const;

  // Null if that would block, unless it is `needed`.
  std::optional<tier::Lease> lease_for(const ShardPiece& tile, bool needed);
  void start_read(Tile& tile);
  void sum_blocks(const Tile& tile);
  void start_write(Tile tile);
  void wait_for_overlapping(const ShardPiece& tile);
  void reap();  // releases the leases of writes that are done
  void finish(std::list<Tile>::iterator write) noexcept;
  void timed(const std::function<void()>& wait);
  void throw_failure() const;
  void keep_failure(int id) noexcept;  // the one that is being handled

  const ReducerParts parts_;
  const GradientTier nvme_;
  std::vector<std::uint64_t> offsets_;  // by id
  std::int64_t tile_numel_ = 0;
  tier::Lease staging_;  // of two tiles between the device and the host; none: they are one memory
  device::Memory block_memory_;
  std::vector<std::int64_t> first_block_;  // by id, of block_memory_; one more at the end
  std::list<Tile> writes_;                 // in the order in which they were started
  std::exception_ptr failure_;

  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> written_bytes_{0};
  std::atomic<std::int64_t> waited_ns_{0};
};

}  // namespace tessera::grad
