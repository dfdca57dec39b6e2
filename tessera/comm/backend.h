// The interface that a network implements: it moves bytes between the ranks of one group.
//
// Group (group.h) adds the rest: sums in rank order, tags, counting, timeouts and messages are
// written once, so all backends give the same bits and the same errors.
//
// Order: a backend matches the n-th call on one rank with the n-th call on every other rank.
// Group calls from one thread at a time and in the same order everywhere; a backend must start
// calls in that order and may finish them in any.
//
// Memory: pointers stay valid until the returned Pending is done; if a call was aborted, as long as
// the backend holds `keep_alive`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/exact_sum.h"
#include "tessera/comm/tag.h"
#include "tessera/device/device.h"

namespace tessera::comm {

using device::Pending;

struct GatherBytes {
  const void* shard = nullptr;  // this rank's piece; may be its own slot in `full`
  void* full = nullptr;         // size() pieces in rank order
  std::size_t shard_bytes = 0;
  // Consumes a rank's piece. A backend that reads its peers' memory calls it for each piece as soon
  // as that may be read, on the peer's memory where it can, else on a copy in `full`; other
  // backends leave all pieces in `full` and do not call it. Null: pieces are to be written to
  // `full`.
  std::function<void(std::size_t rank, const std::byte* piece, device::Stream* stream)> use = {};
};

// Piece r of `send` goes to rank r; piece r of `receive` is from rank r. Pieces begin one stride
// apart, so that a part of each piece of a larger array can be sent by itself.
struct PieceBytes {
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t piece_bytes = 0;
  std::size_t send_stride = 0;
  std::size_t receive_stride = 0;
  // Called when all pieces are received, before the call ends, by a backend that reads its peers'
  // memory; for other backends Group does it. May be null.
  std::function<void(device::Stream* stream)> use = {};

  bool contiguous() const { return send_stride == piece_bytes && receive_stride == piece_bytes; }
};

// What a call has in addition to its memory.
struct Call {
  CallTag tag;
  std::shared_ptr<const CallWords> words;  // for backends that compare tags; may be null
  std::shared_ptr<const void> keep_alive;  // may be null
  device::Stream* stream = nullptr;        // stream-ordered backends order the call after it
  // CallOptions::met, for backends that compare tags; may be null.
  std::shared_ptr<std::atomic<bool>> met;
  std::span<const int> world_ranks = {};  // the ranks' names in messages, by rank
};

// Memory that a rank holds for the lifetime of a group, independent of its calls.
struct HeldMemory {
  Tier tier = Tier::kHost;
  std::size_t bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;  // "shm", "ipc", "gloo", "nccl", "solo"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Pieces of zero bytes are never passed down. `parts` may be empty only for a barrier.
  virtual Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) = 0;
  // Send and receive do not overlap. Stream-ordered backends get contiguous pieces only.
  virtual Pending start_all_to_all(const PieceBytes& pieces, const Call& call) = 0;
  virtual Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) = 0;

  // An all-gather whose result only the ranks with wants[r] != 0 receive; on the others `full` is
  // not read. A rank sends its piece to each other rank that wants it, and nothing else. REQUIRES:
  // some wants[r] != 0. `copies`: see gather_to_needs_copies().
  virtual Pending start_gather_to(std::span<const GatherBytes> parts,
                                  std::span<const std::uint8_t> wants, std::byte* copies,
                                  const Call& call);
  // True: `copies` must hold one copy of this rank's pieces per receiving rank, for a network that
  // cannot send the same memory to several ranks. False: `copies` is null.
  virtual bool gather_to_needs_copies() const { return false; }

  // True: ranks read each other's memory. Then small pieces are not packed, and reductions need no
  // staging: the next two methods read the input in place.
  virtual bool reads_peers() const { return false; }
  // Piece r of `input` (shard_numel elements) is rank r's. Adds in rank order. REQUIRES:
  // reads_peers(), and what check_reduction() checks.
  virtual Pending start_reduce_scatter(const void* input, void* output, std::size_t shard_numel,
                                       DType dtype, DType output_dtype, const Call& call);
  // In place; in rank order. REQUIRES: reads_peers().
  virtual Pending start_all_reduce(void* data, std::size_t numel, DType dtype, Reduction reduction,
                                   const Call& call);

  // Buffers through which memory passes that peers cannot read. Group charges them.
  virtual HeldMemory held_memory() const { return {}; }

  // A backend over some of this one's ranks (this rank among them), in this order. Collective over
  // exactly those ranks; `name` is the same on them and unused before.
  virtual std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) = 0;

  // Payload bytes that this rank sends for a broadcast: the only collective whose closed form
  // depends on the backend's algorithm.
  virtual std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const = 0;

  // True: the backend compares tags itself, before any data moves, and fails calls that do not
  // match. False: Group exchanges them through start_tags() first.
  virtual bool compares_tags() const { return false; }

  // Fills in the other ranks' tags; this rank's is set. Runs concurrently with the other calls, and
  // is matched only with other start_tags(), in their order. REQUIRES: !compares_tags().
  virtual Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags);
  // The same with the words of a call whose tags differ. It is the last call of the group.
  // Stream-ordered backends send words by the way of tags; the default is an all-gather.
  virtual Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words);

  // All-gather of host memory, independent of the transfers of other calls, so that it waits for no
  // device: fills in the other ranks' pieces of `all`; this rank's is set. Where Group exchanges
  // tags, it is matched only with other start_host_gather(), in their order, and is called after
  // the ranks have agreed on the call; otherwise it is a call like any other, with its tag
  // compared. REQUIRES: stream_ordered() or reads_peers().
  virtual Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call);

  // True: calls are work of the device's streams: they return at once, and their memory is the
  // device's (NCCL, ipc, a world of one). Their Pending is on the call's stream, or, where
  // reads_peers(), one after which other streams can be ordered. If Group exchanges the tags, data
  // moves before they are compared: calls that do not match may write only their own outputs, and
  // may hang until abort(). False: memory is the host's.
  virtual bool stream_ordered() const { return false; }

  // reduce_in_rank_order() of exact_sum.h for this backend's memory: enqueued on `stream`, or, if
  // that is null, done on the calling thread.
  virtual Pending start_reduce(const RankParts& parts, void* out, DType out_dtype,
                               Reduction reduction, device::Stream* stream);

  // Scratch memory that the backend can access, for work of `stream`; not zeroed.
  virtual std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream* stream);
  // What that is charged to, where Staging keeps it.
  virtual Tier staging_tier() const { return Tier::kHost; }

  // Ends calls in flight, where the network allows it: they fail with `reason`. Later calls need
  // not work.
  virtual void abort(const std::string& reason) = 0;
};

// A world of one, stream-ordered: no network, no threads. Every collective is a copy or does
// nothing. With a device, copies are made by it in the order of the call's stream; without one the
// memory is the host's.
std::unique_ptr<Backend> make_solo_backend(device::Device* device = nullptr);

}  // namespace tessera::comm
