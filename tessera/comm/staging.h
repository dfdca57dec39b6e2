// Staging of a group's calls: packed small pieces, data received by an all-to-all before it is
// added, and, where the network cannot reach the caller's memory, copies of that memory.
//
// A call states its size when it is prepared, and gets it in one piece, from one of two places:
//
//   shelf    the default. Buffers are kept and reused, because fresh pages cost more than the copy
//            that fills them, and allocating and freeing GPU memory waits for its streams: a step's
//            calls repeat, so after the first step nothing is allocated. At most kMaxKept idle
//            buffers are kept. The total depends on how many calls were in flight at once.
//   region   after reserve(bytes): exactly that, held all the time. A call that does not fit waits
//            for earlier calls. A call that needs more than the whole region gets a separate
//            allocation, which is freed with it.
//
// Every byte is charged to the ledger from allocation to release, idle or not. Where calls pass
// through copies (CallMemory::kCopied), staging is pinned memory of the device from which they are
// copied, and is charged by it.
//
// Calls that are work of streams have no region: the thread that starts a call may also launch it,
// and must not wait for space. Over ipc they use the shelf: a queue drops a lease when the device
// is done with the call, including the peers' reads, so no stream uses what lies on the shelf.
// Other backends allocate per call, with a stream-aware allocator.
//
// [Note: waiting for room] Staging is taken when a call is launched, by the launching thread: at
// the start of a call the caller would wait for the network. The wait ends on every rank, because
//  (1) a group launches calls in order, so only calls before this one hold staging, and all of them
//      have been launched here;
//  (2) consider the first call that some rank has not launched yet. All ranks have launched every
//      call before it, so those calls depend only on the network, this group's threads and their
//      inputs; they end and release their staging. Then this call fits, since it needs no more than
//      the region, and is launched; and so on.
// No step waits for the thread that starts calls, nor for other groups; copies of a call's memory
// wait for nothing (CallCopies). Regions of different sizes on different ranks are slow, not wrong.
// After a failure stop() ends the wait.
//
// [Note: what outlives the group] A call that is stuck in the network holds its staging, and may
// release it after the group is destroyed. Pinned staging of such a call is leaked: its device and
// ledger may already be destroyed, and the process is about to exit.
//
// Threads: take() from the launching thread, reserve() from the one that starts calls, stop() from
// any. Leases may be dropped on any thread, also after this object is destroyed. CallCopies: one
// thread at a time, and not the one that starts calls where finish() blocks. The functions are
// pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"
#include "tessera/device/arena_map.h"
#include "tessera/device/device.h"

namespace tessera::comm {

// --- How much staging a call takes, known before the call: exact, and rounded as in a reserved
// region. Group uses these functions, so a plan made with them holds. Calls that are not named here
// (barrier) take none.

// Up to this many bytes from all ranks together, an all-reduce gathers everything and each rank
// sums locally: one round trip instead of two, and the same bits.
inline constexpr std::size_t kSmallAllReduceBytes = std::size_t{64} * 1024;

// How the network accesses the memory passed to calls.
enum class CallMemory : std::uint8_t {
  kReached,  // the network reads and writes it
  kCopied,   // it is device memory, and the network reaches only host memory
  kShared,   // ranks read each other's memory: only encoded pieces are staged
};

constexpr std::size_t staging_room(std::size_t bytes) { return device::round_to_arena(bytes); }

// Small pieces of a gather travel together in one message, a pack.
constexpr bool is_small_piece(std::size_t shard_bytes, std::size_t pack_below_bytes) {
  return shard_bytes > 0 && shard_bytes < pack_below_bytes;
}
// By piece: whether it is packed. A single small piece is not: packing it would only add a copy.
std::vector<bool> packed_pieces(std::span<const std::size_t> shard_bytes,
                                std::size_t pack_below_bytes);
// Bytes of a piece in a pack.
std::size_t packed_bytes(std::size_t shard_bytes);

// One rank's piece of a tensor, as it travels. Encoded pieces are received into staging, except in
// a world of one; in a pack they need no further staging.
struct GatherPiece {
  std::size_t wire_bytes = 0;
  bool is_encoded = false;
};
// A piece that is not packed, of which `num_pieces` are received.
constexpr bool is_staged_piece(const GatherPiece& piece, std::size_t num_pieces,
                               CallMemory memory) {
  return memory == CallMemory::kCopied || (piece.is_encoded && num_pieces > 1);
}

// REQUIRES of all below: at least one rank, no negative number of elements.
std::size_t all_gather_staging_bytes(std::span<const GatherPiece> pieces,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);
// The same for pieces that are not encoded.
std::size_t all_gather_staging_bytes(std::span<const std::size_t> shard_bytes,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);

struct GatherToStaging {
  int num_ranks = 1;
  int num_wanting = 1;   // ranks that receive it
  bool receives = true;  // this rank does
  bool copies = true;    // Backend::gather_to_needs_copies()
  CallMemory memory = CallMemory::kReached;
};
std::size_t gather_to_staging_bytes(std::span<const GatherPiece> pieces,
                                    std::size_t pack_below_bytes, const GatherToStaging& call);
std::size_t gather_to_staging_bytes(std::span<const std::size_t> shard_bytes,
                                    std::size_t pack_below_bytes, const GatherToStaging& call);

std::size_t reduce_scatter_staging_bytes(std::int64_t shard_numel, DType dtype, int num_ranks,
                                         CallMemory memory = CallMemory::kReached);
// Pieces of `wire_bytes` each, both sent and received.
std::size_t encoded_reduce_scatter_staging_bytes(std::size_t wire_bytes, int num_ranks);
std::size_t all_reduce_staging_bytes(std::int64_t numel, DType dtype, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);
std::size_t broadcast_staging_bytes(std::size_t bytes, CallMemory memory);
std::size_t all_to_all_staging_bytes(std::size_t piece_bytes, int num_ranks, CallMemory memory);

// --- Who holds it.

// The staging of one call: valid from Staging::take() on, released with the lease.
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

  // `ledger` may be null. `copied_from`: the device whose memory is copied to and from staging;
  // null: none.
  Staging(Backend& backend, Ledger* ledger, device::Device* copied_from = nullptr);
  // Waits for taken leases if they are pinned memory of a device and the group was not stopped.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // See [Note: waiting for room]. Throws CommError once stopped.
  void take(StagingLease& lease, device::Stream* stream);

  // From now on calls take their staging from one region of `bytes`; 0: from the shelf again. Waits
  // until taken leases are released, unless stopped. No effect for stream-ordered backends.
  void reserve(std::size_t bytes);

  // The group has failed or closed: ends all waits in take() and reserve().
  void stop();

 private:
  struct State;
  std::shared_ptr<std::byte> allocate(std::size_t bytes, device::Stream* stream);

  Backend& backend_;
  device::Device* const copied_from_;
  std::shared_ptr<State> state_;
};

// Copies between the caller's memory and the memory that the network reaches. Where both are host
// memory, copies are made at once. Where the caller's is device memory, they are work of the
// device's comm stream.
//
// Why a separate stream: a caller may order any other stream after the very call to which the
// copies belong, and they would wait for themselves. The comm stream is never ordered after a call,
// so copies that were started always complete, and a failed group can still wait for them before it
// tells the owners of the memory.
//
// A codec's work uses the same stream: it reads and writes the caller's memory.
class CallCopies {
 public:
  // `device`: whose memory is passed to calls; null: the network reaches it. `stream`: the call's
  // stream in a stream-ordered group, where nothing is copied.
  explicit CallCopies(device::Device* device, device::Stream* stream = nullptr)
      : device_(device),
        stream_(device != nullptr ? &device->stream(device::StreamKind::kComm) : stream) {}
  CallCopies(const CallCopies&) = delete;
  CallCopies& operator=(const CallCopies&) = delete;
  ~CallCopies() {
    try {
      static_cast<void>(finish());
    } catch (...) {  // another failure is being reported; here only the end of the copies matters
    }
  }

  // Either side may be device or host memory. Both stay valid until finish().
  void add(void* to, const void* from, std::size_t bytes) {
    if (to == from || bytes == 0) {
      return;
    }
    if (device_ == nullptr) {
      std::memcpy(to, from, bytes);
    } else {
      last_ = device_->start_copy(to, from, bytes, *stream_);
    }
  }
  // Calls `start(stream)`, which enqueues the work there, or does it if the stream is null.
  template <typename Start>
  void add_work(const Start& start) {
    last_ = start(stream_);
    if (stream_ == nullptr) {
      std::exchange(last_, {}).wait();
    }
  }

  // Blocks until all copies are made, and throws their failure; does not wait for work of the
  // call's own stream.
  device::Pending finish() {
    device::Pending last = std::exchange(last_, {});
    if (device_ != nullptr || stream_ == nullptr) {
      std::exchange(last, {}).wait();
    }
    return last;
  }

 private:
  device::Device* const device_;
  device::Stream* const stream_;
  device::Pending last_;  // the last work on the stream: when it is done, so is all before it
};

}  // namespace tessera::comm
