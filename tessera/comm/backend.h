// What a network must be able to do for us: move bytes between the ranks of one group.
//
// Backends move, Group adds (group.h): sums in rank order, tags, counting, time limits and messages
// are written once, above this line, so all backends give the same bits and the same errors.
//
// Order: a backend matches the n-th call on one rank with the n-th call on every other rank.
// Group calls from one thread at a time and in the same order everywhere; a backend must start
// calls in that order and may finish them in any.
//
// Memory: pointers stay valid until the returned Pending is done, or, if a call was aborted, as
// long as `keep_alive` is held by the backend.
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
  // What is to become of a rank's piece once it is here, and may be read: of a backend that reads
  // its peers' memory, which then reads pieces where they lie, and has `full` for those that it
  // cannot. The others leave all pieces in `full`. Null: they belong there.
  std::function<void(std::size_t rank, const std::byte* piece, device::Stream* stream)> use = {};
};

// Piece r of `send` goes to rank r; piece r of `receive` comes from rank r. Pieces lie at a
// distance of their stride, so that a part of each piece of a larger array can travel by itself.
struct PieceBytes {
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t piece_bytes = 0;
  std::size_t send_stride = 0;
  std::size_t receive_stride = 0;
  // What is to be done when all is received: by a backend that reads its peers' memory, before the
  // call ends. The others leave it to Group. Null: nothing.
  std::function<void(device::Stream* stream)> use = {};

  bool contiguous() const { return send_stride == piece_bytes && receive_stride == piece_bytes; }
};

// What a call carries besides its memory.
struct Call {
  CallTag tag;
  std::shared_ptr<const CallWords> words;  // for backends that compare tags; may be null
  std::shared_ptr<const void> keep_alive;  // may be null
  device::Stream* stream = nullptr;        // stream-ordered backends start behind it
  // CallOptions::met, for backends that compare tags; may be null.
  std::shared_ptr<std::atomic<bool>> met;
  std::span<const int> world_ranks = {};  // what to call the ranks in messages, by rank
};

// What a rank holds in a group as long as that lives, whatever its calls.
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
  // not looked at. A rank sends its piece to each other rank that wants it, and nothing else.
  // REQUIRES: some rank wants it. `copies`: see gather_to_needs_copies().
  virtual Pending start_gather_to(std::span<const GatherBytes> parts,
                                  std::span<const std::uint8_t> wants, std::byte* copies,
                                  const Call& call);
  // True: `copies` must be room for one copy of this rank's pieces per rank that wants them, for a
  // network that sends different ranks different memory only. False: it is null.
  virtual bool gather_to_needs_copies() const { return false; }

  // True: ranks read each other's memory. Small pieces need no packing then, and what is added up
  // needs no staging: these two take it from where it lies.
  virtual bool reads_peers() const { return false; }
  // Piece r of `input` (shard_numel elements) is rank r's. Adds in rank order. REQUIRES:
  // reads_peers(), and what check_reduction() checks.
  virtual Pending start_reduce_scatter(const void* input, void* output, std::size_t shard_numel,
                                       DType dtype, DType output_dtype, const Call& call);
  // In place; in rank order. REQUIRES: reads_peers().
  virtual Pending start_all_reduce(void* data, std::size_t numel, DType dtype, Reduction reduction,
                                   const Call& call);

  // Chunks that other memory passes through. Group charges them.
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

  // Fills in the other ranks' tags; this rank's is at its place. Travels beside the other calls,
  // matched only with other start_tags(), in their order. REQUIRES: !compares_tags().
  virtual Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags);
  // The same with the words of a call on which the ranks do not agree. Nothing travels after it.
  // Stream-ordered backends send words where they send tags; the default is an all-gather.
  virtual Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words);

  // All-gather of memory of the host, beside what moves the memory of calls, so that it waits for
  // no device: fills in the other ranks' pieces of `all`; this rank's is at its place. Where Group
  // exchanges tags, it is matched with other start_host_gather() only, in their order, and comes
  // when the ranks have agreed on the call; else it is a call as any other, with its tag compared.
  // REQUIRES: stream_ordered() or reads_peers().
  virtual Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call);

  // True: calls are work of the device's streams: they return at once, and their memory is the
  // device's (NCCL, ipc, a world of one). Their Pending is of the call's stream, or, where
  // reads_peers(), of one that others can be ordered behind. Where tags are exchanged by Group,
  // data moves before they are compared: calls that do not match must harm nobody's memory but
  // their own outputs, and may hang until abort(). False: host memory.
  virtual bool stream_ordered() const { return false; }

  // reduce_in_rank_order() of exact_sum.h, where this backend's memory lies. With a stream it is
  // enqueued there; without one it is done on the calling thread.
  virtual Pending start_reduce(const RankParts& parts, void* out, DType out_dtype,
                               Reduction reduction, device::Stream* stream);

  // Scratch that the backend's memory accesses can reach, for work of `stream`; not zeroed.
  virtual std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream* stream);
  // What that is charged to, where Staging keeps it.
  virtual Tier staging_tier() const { return Tier::kHost; }

  // Ends what is in flight, where the network allows it: waiting calls fail with `reason`. Later
  // calls need not work.
  virtual void abort(const std::string& reason) = 0;
};

// A world of one, stream-ordered: no network, no threads. Every collective is a copy, or nothing.
// With a device, copies go through it in the order of the call's stream; without one the memory is
// the host's.
std::unique_ptr<Backend> make_solo_backend(device::Device* device = nullptr);

}  // namespace tessera::comm
