// One rank's part of a save: writes its tensors to one file, on separate threads, while training
// goes on. Each thread takes the next tile, reads it, hashes it and copies it to the file's
// staging. A tile's place in the file is fixed when the tile is taken; tiles may complete in any
// order. Only the checksum of a tensor is carried from tile to tile.
//
// Tensors belong to owners (parameters, by id). An owner's tensors change only in its update, which
// first calls release(owner). Until then they are read in place. Owners are read in file order, and
// from the end once an update runs: the update visits owners in file order too, and would otherwise
// wait for the reader at every owner while the buffer has free space. An owner that is requested by
// release() and not written yet is copied into the buffer, if all of it fits, and may change after
// the copy; otherwise it is written next, and may change once it is read.
//
//                next in order, or requested
//   kWaiting --------------------------------> kReading -------> kRead
//       |        requested,            copied              written
//       +-----------------> kCopying ---------> kBuffered ------> kRead
//           it fits
//
// Buffered owners are written when nothing else waits; or first, once a copy did not fit, to free
// the buffer.
//
// Invariants:
//  (1) The file has the values that an owner's tensors had when the snapshot was made.
//  (2) Additional memory: the file's staging, eight tiles, and the buffer.
//  (3) A failure fails wait(). release() never fails, so that updates go on: after a failure every
//      owner is released as soon as it is no longer read.
//
// Threads: release(), done(), wait_for(), bytes_so_far() and wait_for_bytes() from any thread; the
// rest from one thread at a time. Reads are started by the snapshot's threads and by callers of
// release().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/fragment_writer.h"
#include "tessera/checkpoint/stored_blocks.h"
#include "tessera/core/clock.h"
#include "tessera/core/dtype.h"
#include "tessera/device/device.h"
#include "tessera/device/pending.h"
#include "tessera/tier/buffer_pool.h"

namespace tessera::checkpoint {

// Elements are read in tiles that begin at multiples of this; memory for a tile is aligned to
// kBlockBytes and holds numel rounded up to a multiple of it. Equal to shard::kShardStep.
inline constexpr std::int64_t kTileStep = 2048;

struct SnapshotTensor {
  TensorEntry entry;  // in the file: the whole tensor or a part
  int owner = -1;     // -1: nothing overwrites it
  // Offset of its first byte in the whole tensor, for ContentHash: a multiple of 8.
  std::uint64_t content_begin = 0;
  // The pieces in the whole tensor, if its bytes are not contiguous there; empty: they are.
  std::vector<ContentPiece> pieces = {};
  // Copies elements [begin, begin + numel) to host memory, as Optimizer::start_read() does. Called
  // from any thread, several at a time, until the owner is released.
  std::function<device::Pending(std::int64_t begin, std::int64_t numel, std::byte* to)> start_read;
};

struct SnapshotOptions {
  std::string path;  // path of the file
  WriterOptions writer;
  // Memory of the eight tiles, some of which are read while others are written: pinned where a
  // device copies into them. Charged as Role::kStaging.
  device::Device* device = nullptr;
  Tier tier = Tier::kHost;
  std::size_t tile_bytes = std::size_t{1} << 20;  // of each
  int num_threads = 2;                            // at least one, useful up to eight
  bool in_background = false;                     // runs at low priority
  // Memory for copies of owners that an update is about to change, pinned likewise. Null: none, and
  // an update waits until its owner is read. Used by the snapshot alone.
  tier::BufferPool* buffer = nullptr;
  const Clock* clock = nullptr;  // clock of times(); null: times are zero
};

struct SnapshotTimes {
  double writing_s = 0;  // from the beginning until the file was on disk
  double held_s = 0;     // time during which at least one release() was not done
};

struct SnapshotTensorResult {
  WrittenTensor written;
  std::uint64_t content = 0;
};

class Snapshot {
 public:
  // Starts writing. IoError if the file cannot be created. REQUIRES: all earlier changes of tensors
  // are done, and later ones wait for release().
  Snapshot(std::vector<SnapshotTensor> tensors, const SnapshotOptions& options);
  // Stops early: releases everything, and waits for its threads. release() may be called meanwhile.
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // The result is done when the owner's tensors may change, and never fails. The call blocks while
  // it starts copies into the buffer, or makes them where tensors are in host memory.
  device::Pending release(int owner);
  // Writes no further tensor, and releases every owner. Reads in flight are completed.
  void give_up();
  bool done() const;  // wait() would not block
  // done(), after at most `limit`.
  bool wait_for(std::chrono::nanoseconds limit) const;
  // Blocks until the file is complete and on disk. Throws the first failure.
  void wait();

  // Once wait() has returned.
  const std::vector<SnapshotTensorResult>& results() const;  // by tensor
  std::uint64_t file_bytes() const;
  SnapshotTimes times() const;
  // Bytes of tensors passed to the writer so far, for progress and predictions. At any time.
  std::uint64_t bytes_so_far() const;
  // Blocks until bytes_so_far() reaches `bytes`, the snapshot is done, or the limit is over.
  void wait_for_bytes(std::uint64_t bytes, std::chrono::nanoseconds limit) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
