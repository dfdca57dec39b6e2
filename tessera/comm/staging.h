// Staging of a group's calls: packed small pieces, what an all-to-all receives before it is added,
// and, where the network does not reach the caller's memory, copies of it.
//
// A call says how much it needs when it is prepared, and gets it whole, from one of two places:
//
//   shelf    the usual one. Buffers are kept and used again, because fresh pages cost more than the
//            copy that fills them, and taking and freeing memory of a GPU waits for its streams: a
//            step's calls repeat, so after the first step nothing is allocated. At most kMaxKept
//            idle buffers are kept. How much is held depends on how many calls were under way at
//            once.
//   region   after reserve(bytes): exactly that, held all the time. A call that finds no room waits
//            for the ones before it. One that needs more than the whole region has memory of its
//            own, which is freed with it.
//
// Every byte is charged to the ledger from allocation to release, idle or not. Where calls pass
// through copies (CallMemory::kCopied) it is pinned memory of the device that they are copied from,
// and charged there.
//
// Calls that are work of streams have no region: who starts a call may be who launches it, and must
// not wait for room. Over ipc they have the shelf: a queue drops a lease when the device is done
// with the call, the peers' reads included, so what lies on the shelf is used by no stream. Other
// backends allocate per call, with an allocator that knows streams.
//
// [Note: waiting for room] Staging is taken when a call is launched, by the thread that launches:
// if it were taken when a call is started, whoever starts calls would wait for the network. The
// wait ends on every rank, because
//  (1) a group launches calls in order, so only calls before this one hold staging, and all of them
//      have been launched here;
//  (2) take the first call that some rank has not launched yet: every call before it has been
//      launched by all ranks, so those end by the network, this group's own threads and their
//      inputs, and give their staging back. Then there is room for this one, since it needs no more
//      than the region; it is launched; and so on.
// No step of this waits for the thread that starts calls, nor for other groups; copies of a call's
// memory wait for nothing (CallCopies). Regions of different sizes on different ranks are slow, not
// wrong. What ends otherwise, by a failure, ends the wait by stop().
//
// [Note: what outlives the group] A call that is stuck in the network holds its staging, and frees
// it at some time after the group is gone. Pinned memory must not go back then, because its device
// and ledger may be gone, too: it is kept to the end of the process, which is near.
//
// Threads: take() from the launching thread, reserve() from the one that starts calls, stop() from
// any; what was taken may be dropped on any thread, also after this object is gone. CallCopies: one
// thread at a time; not the one that starts calls where finish() blocks. The functions are pure.
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

// --- How much staging a call takes, before it is made: to the byte, and rounded as a reserved
// region gives it out. Group asks these same functions, so a plan made of them holds. Calls that
// are not named here (barrier) take none.

// Up to this many bytes from all ranks together, an all-reduce gathers everything and adds at home:
// one round trip instead of two, and the same bits.
inline constexpr std::size_t kSmallAllReduceBytes = std::size_t{64} * 1024;

// Where the memory is that calls are given.
enum class CallMemory : std::uint8_t {
  kReached,  // the network reads and writes it
  kCopied,   // it is a device's, and the network reaches the host's only
  kShared,   // ranks read each other's: nothing is staged but what is encoded
};

constexpr std::size_t staging_room(std::size_t bytes) { return device::round_to_arena(bytes); }

// Small pieces of a gather travel together in one message, a pack.
constexpr bool is_small_piece(std::size_t shard_bytes, std::size_t pack_below_bytes) {
  return shard_bytes > 0 && shard_bytes < pack_below_bytes;
}
// By piece. One small piece alone saves nothing by a copy, so it is not packed.
std::vector<bool> packed_pieces(std::span<const std::size_t> shard_bytes,
                                std::size_t pack_below_bytes);
// What a piece takes in a pack.
std::size_t packed_bytes(std::size_t shard_bytes);

// One rank's piece of a tensor, as it travels. Encoded ones are received beside their place, but
// for those of a world of one, and in a pack they need nothing more.
struct GatherPiece {
  std::size_t wire_bytes = 0;
  bool is_encoded = false;
};
// One that travels by itself, and of which `num_pieces` are received.
constexpr bool is_staged_piece(const GatherPiece& piece, std::size_t num_pieces,
                               CallMemory memory) {
  return memory == CallMemory::kCopied || (piece.is_encoded && num_pieces > 1);
}

// REQUIRES of all below: at least one rank, no negative number of elements.
std::size_t all_gather_staging_bytes(std::span<const GatherPiece> pieces,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);
// Of pieces that are not encoded.
std::size_t all_gather_staging_bytes(std::span<const std::size_t> shard_bytes,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);

struct GatherToStaging {
  int num_ranks = 1;
  int num_wanting = 1;   // ranks that get it
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
// Of pieces that travel as `wire_bytes` each: those that are sent, and those that are received.
std::size_t encoded_reduce_scatter_staging_bytes(std::size_t wire_bytes, int num_ranks);
std::size_t all_reduce_staging_bytes(std::int64_t numel, DType dtype, int num_ranks,
                                     CallMemory memory = CallMemory::kReached);
std::size_t broadcast_staging_bytes(std::size_t bytes, CallMemory memory);
std::size_t all_to_all_staging_bytes(std::size_t piece_bytes, int num_ranks, CallMemory memory);

// --- Who holds it.

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

  // `ledger` may be null. `copied_from`: whose memory calls are copied from and to; null: they are
  // not.
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

// Copies between the memory of a call, which its caller gave, and the memory that the network
// reaches. For most groups that is one memory, and copies are made at once. Where the caller's
// memory is that of a device, which the host must not touch, they are work of the device's comm
// stream.
//
// Why a stream of their own: a caller may order any other stream behind the very call that the
// copies belong to, and they would wait for themselves. Nothing is ever ordered behind a call on
// this one, so what was started ends by itself, and a group that has failed can still wait for it
// before it tells the owners of the memory.
//
// A codec's work goes the same way: it reads and writes memory of the caller.
class CallCopies {
 public:
  // `device`: whose memory calls are given; null: it is reached. `stream`: of a call that is work
  // of one, which nothing is copied for.
  explicit CallCopies(device::Device* device, device::Stream* stream = nullptr)
      : device_(device),
        stream_(device != nullptr ? &device->stream(device::StreamKind::kComm) : stream) {}
  CallCopies(const CallCopies&) = delete;
  CallCopies& operator=(const CallCopies&) = delete;
  ~CallCopies() {
    try {
      static_cast<void>(finish());
    } catch (...) {  // another failure is on its way; here only the end of the copies matters
    }
  }

  // Either side may be the device's or the host's. Both stay valid until finish().
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
  // `start(stream)` starts it there, or, if that is null, does it.
  template <typename Start>
  void add_work(const Start& start) {
    last_ = start(stream_);
    if (stream_ == nullptr) {
      std::exchange(last_, {}).wait();
    }
  }

  // Blocks until all are made, and throws what went wrong; but work of a call's own stream is left
  // to that.
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
  device::Pending last_;  // of a stream: when it is done, so is all before it
};

}  // namespace tessera::comm
