// One rank's part of a save: writes its tensors to one file, on threads of its own, while training
// goes on. Each takes the next tile, starts to read it, hashes it and puts it into the file's
// staging. Tiles have their places in the file in the order in which they are taken; they come in
// any. Only a tensor's own checksum goes from tile to tile.
//
// Tensors belong to owners (parameters, by id). What an owner's tensors hold changes only in its
// update, and whoever is about to change them asks first: release(owner). Until then they are read
// where they lie, owner by owner in the order of their first tensors; from the other end once
// somebody has asked: an update asks in about that order, and would wait for the very owner that is
// being read, again and again, while the buffer has room. What is asked for and not written yet is
// copied into the buffer, if that has room for all of the owner, and may change when it is there;
// else it is written next, and may change when it has been read.
//
//                next in order, or asked for
//   kWaiting --------------------------------> kReading -------> kRead
//       |        asked for,            copied              written
//       +-----------------> kCopying ---------> kBuffered ------> kRead
//           there is room
//
// What is buffered is written when nothing waits; or, once somebody was refused, before that, so
// that there is room again.
//
// Invariants:
//  (1) What is written of an owner is what it had when the snapshot was made.
//  (2) Extra memory: the file's staging, eight tiles, and the buffer.
//  (3) A failure fails wait(); release() never fails, so that an update goes on whatever becomes of
//      the file: after a failure everything is released, as soon as nothing reads it any more.
//
// Threads: release(), done(), wait_for(), bytes_so_far() and wait_for_bytes() from any thread; the
// rest from one at a time. Reads are started by the snapshot's threads, and by those that call
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
// kBlockBytes and has room for numel rounded up to it. What shard_store.h calls kShardStep.
inline constexpr std::int64_t kTileStep = 2048;

struct SnapshotTensor {
  TensorEntry entry;  // in the file; whole or a part
  int owner = -1;     // -1: nothing overwrites it
  // Where its first byte lies in the whole tensor, for ContentHash: a multiple of 8.
  std::uint64_t content_begin = 0;
  // The same where not all of its bytes stand there in one run; none: they do.
  std::vector<ContentPiece> pieces = {};
  // Copies elements [begin, begin + numel) to host memory, as Optimizer::start_read() does. Called
  // from any thread, several at a time, until the owner is released.
  std::function<device::Pending(std::int64_t begin, std::int64_t numel, std::byte* to)> start_read;
};

struct SnapshotOptions {
  std::string path;  // of the file
  WriterOptions writer;
  // Of eight tiles, of which some are read while others are written: pinned where a device copies
  // into them. Charged as Role::kStaging.
  device::Device* device = nullptr;
  Tier tier = Tier::kHost;
  std::size_t tile_bytes = std::size_t{1} << 20;  // of each
  int num_threads = 2;                            // at least one; more than tiles are of no use
  bool in_background = false;                     // others that want the cores go first
  // Room for what updates must not wait for, pinned likewise; null: none, and an update waits until
  // its owner has been read. Nobody else takes leases.
  tier::BufferPool* buffer = nullptr;
  const Clock* clock = nullptr;  // of times(); null: they are zero
};

struct SnapshotTimes {
  double writing_s = 0;  // from the beginning until the file was on disk
  double held_s = 0;     // that at least one release() was not done: what updates have waited
};

struct SnapshotTensorResult {
  WrittenTensor written;
  std::uint64_t content = 0;
};

class Snapshot {
 public:
  // Starts writing. IoError if the file cannot be made.
  // REQUIRES: everything that has changed tensors so far is done, and whatever changes them from
  // now on waits for release().
  Snapshot(std::vector<SnapshotTensor> tensors, const SnapshotOptions& options);
  // Stops early: releases everything, and waits for its thread. release() may be called meanwhile.
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Done when the owner's tensors may change; never fails. Blocks as long as it takes to start
  // copies into the buffer, or to make them where tensors are in host memory.
  device::Pending release(int owner);
  // The rest is not written, and nothing is held any more. What is being read is read.
  void give_up();
  bool done() const;  // wait() would not block
  // done(), after at most so long.
  bool wait_for(std::chrono::nanoseconds limit) const;
  // Until the file is complete and on disk. Throws what went wrong.
  void wait();

  // Once wait() has returned.
  const std::vector<SnapshotTensorResult>& results() const;  // by tensor
  std::uint64_t file_bytes() const;
  SnapshotTimes times() const;
  // Of tensors, that the writer has taken: for progress and predictions, at any time.
  std::uint64_t bytes_so_far() const;
  // Until that are so many, or it is done, or the time is over.
  void wait_for_bytes(std::uint64_t bytes, std::chrono::nanoseconds limit) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
