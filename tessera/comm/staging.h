// Scratch of a group's calls: packed small pieces, what an all-to-all receives before it is added.
//
// A call says how much it needs when it is prepared, and gets it whole, from one of two places:
//
//   shelf    the usual one. Buffers are kept and used again, because fresh pages cost more than the
//            copy that fills them: a step's calls repeat, so after the first step nothing is
//            allocated. At most kMaxKept idle buffers are kept. How much is held depends on how
//            many calls were under way at once.
//   region   after reserve(bytes): exactly that, held all the time. A call that finds no room waits
//            for the ones before it. One that needs more than the whole region has memory of its
//            own, which goes with it.
//
// Every byte is charged to the ledger from allocation to release, idle or not. Where calls pass
// through copies (CallMemory::kCopied) it is pinned memory of the device that they are copied from,
// and charged there.
//
// [Note: waiting for room] Scratch is taken when a call is launched, by the thread that launches:
// if it were taken when a call is started, whoever starts calls would wait for the network. The
// wait comes to an end on every rank, because
//  (1) a group launches calls in order, so only calls before this one hold scratch, and all of them
//      have been launched here;
//  (2) take the first call that some rank has not launched yet: every call before it has been
//      launched by all ranks, so those end by the network, this group's own threads and their
//      inputs, and give their scratch back. Then there is room for this one, since it needs no more
//      than the region; it is launched; and so on.
// No step of this waits for the thread that starts calls, nor for other groups; copies of a call's
// memory wait for nothing (call_copies.h). Regions of
// different sizes on different ranks are slow, not wrong. What ends otherwise, by a failure, ends
// the wait by stop().
//
// [Note: what outlives the group] A call that is stuck in the network holds its staging, and lets
// go of it at some time after the group is gone. Pinned memory must not go back then, because its
// device and ledger may be gone, too: it is kept to the end of the process, which is near.
//
// Threads: take() from the launching thread, reserve() from the one that starts calls, stop() from
// any; what was taken may be dropped on any thread, also after this object is gone.
#pragma once

#include <cstddef>
#include <memory>

#include "tessera/comm/backend.h"
#include "tessera/core/ledger.h"

namespace tessera::comm {

// What one call needs. There from Staging::take() on, and given back with the lease.
class StagingLease {
 public:
  explicit StagingLease(std::size_t bytes) : bytes_(bytes) {}

  std::size_t bytes() const { return bytes_; }
  // REQUIRES: taken.
  std::byte* data() const { return memory_.get(); }

 private:
  friend class Staging;
  const std::size_t bytes_;
  std::shared_ptr<std::byte> memory_;
};

class Staging {
 public:
  static constexpr std::size_t kMaxKept = 8;

  // `ledger` may be null. Stream-ordered backends allocate per call: their allocator knows streams.
  // `copied_from`: whose memory calls are copied from and to; null: they are not.
  Staging(Backend& backend, Ledger* ledger, device::Device* copied_from = nullptr);
  // Waits for what was taken, if it is memory of a device and the group was not stopped.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // See [Note: waiting for room]. Throws CommError once stopped.
  void take(StagingLease& lease, device::Stream* stream);

  // From now on calls take their scratch from one region of `bytes`; 0: from the shelf again. Waits
  // until what was taken has been given back, unless stopped. Nothing for stream-ordered backends.
  void reserve(std::size_t bytes);

  // The group is out of use: nobody waits here any more.
  void stop();

 private:
  struct State;
  std::shared_ptr<std::byte> allocate(std::size_t bytes, device::Stream* stream);

  Backend& backend_;
  device::Device* const copied_from_;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
