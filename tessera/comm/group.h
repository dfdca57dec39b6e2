// Ranks that communicate with each other: the interface to the network. c10d is named nowhere above
// it.
//
// Every method that communicates is a collective: all ranks of the group call the same methods in
// the same order. What fixes that order is the caller (registration, trace, agreement), never time.
// Ranks check it: each call carries a tag (tag.h) that is compared before its data moves, and
// a mismatch is an error on every rank that names the rank that differs and both calls with their
// units and parameters.
//
// Numbers: reductions are exact: all-to-all, then a sum in rank order in fp32, rounded once. The
// same input gives the same bits on every backend, for every bucket size and timing. all_reduce is
// reduce-scatter and all-gather of the same sum.
//
// With a codec (codec.h) wires travel in place of elements. The order is the same: what is gathered
// is decoded into the slots of its ranks, and a sum adds decoded values in rank order in fp32,
// rounded once. The codec is that of the memory which calls are given, and equal on all ranks.
//
// Asynchrony: a call returns at once. Its memory must stay valid until the Pending is done (or give
// `keep_alive`, which is held also when a failed call is still stuck inside the network). If
// `stream` is given, the call reads its input after what that stream has been given so far.
//
// Failures: a call that takes longer than the timeout, loses a peer or is matched with another call
// fails with a CommError that says what was waited for, for which unit and parameter, and which
// ranks have not arrived. The first failure poisons the group: every later call repeats it.
//
// Threads: start_* from one thread at a time. Threads of the group finish calls (add, unpack, watch
// the time) in the order in which they were started. Destroying a Group waits for what is in
// flight, unless an exception is the reason for it: then calls in flight are aborted, as by
// abort().
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/call_queue.h"
#include "tessera/comm/codec.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/tag.h"
#include "tessera/comm/watchdog.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"
#include "tessera/core/spans.h"

namespace tessera::comm {

struct GroupOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Pieces smaller than this travel together in one message.
  std::size_t pack_below_bytes = std::size_t{64} * 1024;
  // How often a rank posts its status, and looks whether another one has failed.
  std::chrono::milliseconds heartbeat{1000};
  // What calls are staged in and what the backend holds is charged here; null: not charged.
  Ledger* ledger = nullptr;
  // Whose memory is passed in; null: host memory. Outlives the group. If it is discrete and the
  // network reaches the host's memory only (Gloo), calls pass through pinned staging: the group's
  // own threads make the copies (D2H and H2D), and nothing blocks the caller. Host memory may then
  // be passed in, too.
  device::Device* device = nullptr;
  Spans* spans = nullptr;               // every call is recorded here; null: not recorded
  std::shared_ptr<StatusStore> status;  // null: waits are explained without the other ranks' words
  std::string backend_note;             // why the backend is not a faster one; may be empty
};

// As in GroupOptions.
struct GroupOwner {
  device::Device* device = nullptr;
  Ledger* ledger = nullptr;
  Spans* spans = nullptr;
};

struct CallOptions {
  Label label;
  // What the call is about, beyond names and shapes: the ids of the gathered parameters, say.
  // Compared with the other ranks'.
  std::uint64_t content_hash = 0;
  device::Stream* stream = nullptr;
  // The input may be read after this, too. Waited for by the group, not by the caller: for input
  // that a host thread makes (a read from disk, an update). A failure is the call's own.
  device::Pending ready;
  std::shared_ptr<const void> keep_alive;
  // Set once every rank has started this call and all mean the same one. From then on its end
  // depends on streams and the network, not on what any rank's thread does next: it may be waited
  // for by a rank that others need to get on. Set at once by a stream-ordered backend, where
  // waiting blocks no thread. Never set if the ranks do not agree. Null: nobody asks.
  std::shared_ptr<std::atomic<bool>> met;
  // Of a reduce-scatter, whose input is fp32, bf16 or fp16: each piece is encoded once, and decoded
  // once where it is added, this rank's own too. Null: elements travel as they are. Other calls
  // have none, or say so by tensor. Outlives the call.
  const Codec* codec = nullptr;
};

// One tensor of an all-gather: `shard_numel` elements from every rank, written in rank order.
struct Gather {
  const void* shard = nullptr;  // may be this rank's own slot in `full`
  void* full = nullptr;
  std::int64_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view name = {};  // compared, and used in messages, like a label
  // Null: elements travel as they are. Else `shard` is wires_per_rank wires behind each other, of
  // shard_numel elements each, and not in `full`, which gets size() * wires_per_rank pieces of as
  // many decoded elements, in the order of ranks and wires. Outlives the call.
  const Codec* codec = nullptr;
  int wires_per_rank = 1;  // the wires may be those of several ranks that were gathered before
};

struct HostGather {
  Pending done;
  std::shared_ptr<const std::byte> bytes;  // of all ranks, in rank order, once it is done
};

// Bytes that this rank has put on the wire for a group. `payload` equals the closed forms in
// docs/communication.md; `control` is tags and barriers.
struct WireBytes {
  std::uint64_t payload = 0;
  std::uint64_t control = 0;
  std::uint64_t num_calls = 0;
};

class Group {
 public:
  // `name` is the same on all ranks, and unique among the groups that share a status store.
  // `world_ranks[r]` is the world rank of rank r.
  Group(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
        GroupOptions options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  const std::string& name() const { return name_; }
  std::string_view backend_name() const { return backend_->name(); }
  const std::string& backend_note() const { return options_.backend_note; }
  // For plans of staging.
  CallMemory call_memory() const {
    return copied_from_ != nullptr   ? CallMemory::kCopied
           : backend_->reads_peers() ? CallMemory::kShared
                                     : CallMemory::kReached;
  }

  HeldMemory held_memory() const { return backend_->held_memory(); }

  [[nodiscard]] Pending start_all_gather(std::span<const Gather> tensors,
                                         const CallOptions& options = {});
  // The same call with one Pending per tensor, in order: waiting for one does not wait for the
  // others where the backend allows it (small tensors travel together; on a stream all share one).
  // A failure is the failure of every tensor that has not arrived.
  [[nodiscard]] std::vector<Pending> start_all_gathers(std::span<const Gather> tensors,
                                                       const CallOptions& options = {});
  // An all-gather whose result only the ranks with wants[r] != 0 get; on the others `full` may be
  // null. `wants` has an entry per rank and is the same on all. If nobody wants it, it is a
  // barrier.
  [[nodiscard]] Pending start_gather_to(std::span<const Gather> tensors,
                                        std::span<const std::uint8_t> wants,
                                        const CallOptions& options = {});
  // input: size() pieces of `shard_numel` elements of `dtype`; output: this rank's piece of the
  // sum, in `output_dtype` (fp32, or `dtype`; with a codec fp32, bf16 or fp16).
  [[nodiscard]] Pending start_reduce_scatter(const void* input, void* output,
                                             std::int64_t shard_numel, DType dtype,
                                             DType output_dtype, const CallOptions& options = {});
  // In place. kSum adds in rank order; every rank gets the same bits.
  [[nodiscard]] Pending start_all_reduce(void* data, std::int64_t numel, DType dtype,
                                         Reduction reduction = Reduction::kSum,
                                         const CallOptions& options = {});
  [[nodiscard]] Pending start_broadcast(void* data, std::int64_t numel, DType dtype, int root,
                                        const CallOptions& options = {});
  [[nodiscard]] Pending start_all_to_all(const void* send, void* receive, std::int64_t piece_numel,
                                         DType dtype, const CallOptions& options = {});
  [[nodiscard]] Pending start_barrier(const CallOptions& options = {});

  // All-gather of a few bytes of the host, whatever memory other calls are given; `mine` is copied,
  // and as long on every rank. No device has a part in it: where calls are work of streams it ends
  // as soon as all ranks have started it, whatever the device still has to do for calls before it.
  [[nodiscard]] HostGather start_gather_host(std::span<const std::byte> mine,
                                             const CallOptions& options = {});
  // The same, of which every rank keeps what `root` gave. Blocks.
  void broadcast_host(void* data, std::size_t bytes, int root, const CallOptions& options = {});

  // Blocks until all ranks have started every call that this one has started so far, and mean the
  // same ones; throws what their Pendings would, if they do not. Where calls are work of streams it
  // waits for the other ranks' threads, and for no device: what is enqueued behind it depends on
  // nothing that some rank did not mean. Elsewhere it waits for the ends of the calls, which come
  // behind that.
  void wait_agreed();

  // Every call in flight fails now, here and by that on the other ranks, and so does every later
  // one; what `reason` says reaches them where the backend can tell it. For an owner that goes and
  // cannot wait for ranks that may never come. When it returns, the memory of calls is free, as
  // after any failure. Without effect in a group that has failed, or that nobody else is in.
  void abort(const std::string& reason) noexcept;

  // A group over the ranks that passed the same color, in ascending rank order. Blocks.
  std::unique_ptr<Group> split(int color, const std::string& name) {
    return split(color, name, owner());
  }
  // The same, for another owner's memory and books.
  std::unique_ptr<Group> split(int color, const std::string& name, const GroupOwner& owner) {
    return split_by({color, 0}, name, owner);
  }
  // The same, with its ranks by ascending key; where keys are equal, by rank.
  struct Place {
    std::int64_t color = 0;
    std::int64_t key = 0;
  };
  std::unique_ptr<Group> split_by(const Place& place, const std::string& name,
                                  const GroupOwner& owner);
  // Whose memory is passed in; all null where nobody said.
  GroupOwner owner() const { return {options_.device, options_.ledger, options_.spans}; }
  // Calls are work of the streams of the owner's device, and of no other (backend.h).
  bool is_stream_ordered() const { return backend_->stream_ordered(); }

  // Bounds what this rank's calls hold as staging: from the next launch on they take it from one
  // region of `bytes`, which is allocated here and charged as exactly that. Calls that find no room
  // wait for the ones before them (staging.h says why that ends); a call that needs more than the
  // whole region has memory of its own while it lasts. 0: buffers are kept as calls need them, as
  // before the first time. Not a collective. Waits for the calls that hold staging now. Without
  // effect where a call's memory belongs to a stream (NCCL, a world of one). Groups that are split
  // off do not inherit it.
  void reserve_staging(std::size_t bytes) { staging_.reserve(bytes); }

  WireBytes wire_bytes() const { return {payload_bytes_, control_bytes_, num_calls_}; }

 private:
  // What every call starts with. `tag` has what the call knows: operation, shape, bytes. `words`
  // null: those of the label.
  QueuedCall prepare(CallTag tag, const CallOptions& options,
                     std::shared_ptr<const CallWords> words = nullptr);
  // Counts the call and hands it to the queue, or enqueues its phases on its stream.
  // `payload_bytes` is what this rank sends; the closed forms of docs/communication.md.
  Pending start(QueuedCall queued, std::size_t payload_bytes);
  Pending run_on_stream(const QueuedCall& queued);
  device::Stream* stream_of(const CallOptions& options) const;
  void hold_until_done(const Pending& pending, const std::shared_ptr<const void>& keep_alive);
  // All the scratch of a call, for its phases: it is there when they run. Kept alive as long as the
  // call, also when that is stuck in the network.
  std::shared_ptr<const StagingLease> add_staging(QueuedCall& queued, std::size_t bytes);

  // All-gathers (group_gather.cpp); `each` is null, or gets a Pending per tensor.
  Pending start_gather(std::span<const Gather> tensors, const CallOptions& options,
                       std::vector<Pending>* each);
  // Phases of reductions (group_reduce.cpp).
  Pending start_sum(const RankParts& parts, void* output, DType output_dtype, Reduction reduction,
                    const Call& call);
  void add_sum(QueuedCall& queued, const std::function<RankParts()>& parts, void* output,
               DType output_dtype, const std::function<std::byte*()>& copy,
               const std::function<Pending()>& next);
  void add_reduce_scatter(QueuedCall& queued, const void* input, void* output,
                          std::size_t shard_numel, DType dtype, DType output_dtype);
  void add_encoded_reduce_scatter(QueuedCall& queued, const void* input, void* output,
                                  std::int64_t shard_numel, DType dtype, DType output_dtype,
                                  const Codec& codec);

  // Between the call's own memory and its staging, in the call's order. In a phase of a queued call
  // they are done when these return.
  Pending copy(void* to, const void* from, std::size_t bytes, device::Stream* stream);
  Pending zero(void* to, std::size_t bytes, device::Stream* stream);
  // Where a codec works for a call of `stream`, as a backend's copies do; null: on the calling
  // thread.
  device::Stream* codec_stream(device::Stream* stream) const {
    if (stream == nullptr && backend_->stream_ordered() && options_.device != nullptr) {
      return &options_.device->stream(device::StreamKind::kCompute);
    }
    return backend_->stream_ordered() ? stream
           : is_copied()              ? &copied_from_->stream(device::StreamKind::kComm)
                                      : nullptr;
  }
  // What a codec has started there: in a phase of a queued call it is done when this returns.
  Pending finish_coding(Pending pending) const {
    if (!backend_->stream_ordered()) {
      std::exchange(pending, {}).wait();
    }
    return pending;
  }

  // True: exchanging the tags is already a barrier.
  bool exchanges_tags() const { return queue_ && !backend_->compares_tags(); }
  bool is_copied() const { return copied_from_ != nullptr; }
  bool is_shared() const { return call_memory() == CallMemory::kShared; }
  std::size_t pack_below_bytes() const {
    return backend_->stream_ordered() ? 0 : options_.pack_below_bytes;
  }
  std::size_t num_peers() const { return static_cast<std::size_t>(size() - 1); }
  // Null when nothing is to be recorded.
  Spans* spans() const {
    return options_.spans != nullptr && options_.spans->enabled() ? options_.spans : nullptr;
  }

  const std::unique_ptr<Backend> backend_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const GroupOptions options_;
  device::Device* const copied_from_;  // null: the backend reaches the memory of calls
  Staging staging_;
  std::uint64_t sequence_ = 0;
  std::uint64_t num_splits_ = 0;
  std::vector<std::pair<Pending, std::shared_ptr<const void>>> held_;  // see hold_until_done()

  std::atomic<std::uint64_t> payload_bytes_{0};
  std::atomic<std::uint64_t> control_bytes_{0};
  std::atomic<std::uint64_t> num_calls_{0};

  const int num_exceptions_ = std::uncaught_exceptions();
  Watchdog watchdog_;
  std::unique_ptr<CallQueue> queue_;  // null: a world of one. Last: its threads use all above
};

namespace detail_group {

// Bytes of `numel` elements; ConfigError if that, times `times`, is no size of memory.
std::size_t checked_bytes(std::int64_t numel, DType dtype, int times, const char* what);
void check_pointer(const void* data, std::size_t bytes, const char* what);
// ConfigError unless such elements can be encoded.
void check_codec(const Codec& codec, DType dtype, const char* what);

}  // namespace detail_group
}  // namespace tessera::comm
