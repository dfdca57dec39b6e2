// A group of ranks and its collectives: the interface to the network. Modules above comm do not
// name c10d.
//
// Every method that communicates is a collective: all ranks of the group call the same methods in
// the same order, which the caller fixes (registration, trace, agreement), never time. Ranks check
// it: each call carries a tag (tag.h) that is compared before its data moves (on streams: before
// its result is used, see wait_agreed()). A mismatch is an error on every rank that names the rank
// that differs and both calls with their units and parameters.
//
// Numbers: reductions are exact: all-to-all, then a sum in rank order in fp32, rounded once. The
// same input gives the same bits on every backend, for every bucket size and timing. all_reduce is
// reduce-scatter and all-gather of the same sum.
//
// With a codec (codec.h) wires travel in place of elements. The order is the same: gathered wires
// are decoded into the slots of their ranks, and a sum adds decoded values in rank order in fp32,
// rounded once. The codec works on the memory passed to calls, and is equal on all ranks.
//
// Asynchrony: a call returns at once. Its memory must stay valid until the Pending is done, or
// `keep_alive` owns it, which is held even while a failed call is stuck inside the network. If
// `stream` is given, the call reads its input after the work already enqueued there.
//
// Failures: a call that exceeds the timeout, loses a peer or is matched with a different call fails
// with a CommError that names the call, its unit and parameter, and the ranks that have not
// arrived. The first failure poisons the group: every later call repeats it.
//
// Threads: start_* from one thread at a time. Threads of the group finish calls (add, unpack, check
// the timeout) in the order in which they were started. Destroying a Group waits for calls in
// flight; while an exception unwinds it aborts them, as by abort().
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
  // Pieces smaller than this are packed into one message.
  std::size_t pack_below_bytes = std::size_t{64} * 1024;
  // How often a rank posts its status, and checks whether another rank has failed.
  std::chrono::milliseconds heartbeat{1000};
  // Charged for staging and for what the backend holds; null: not charged.
  Ledger* ledger = nullptr;
  // The device whose memory is passed to calls; null: host memory. Outlives the group. If it is
  // discrete and the network reaches only host memory (Gloo), calls pass through pinned staging:
  // the group's threads make the D2H and H2D copies, and the caller does not block. Host memory may
  // then be passed as well.
  device::Device* device = nullptr;
  Spans* spans = nullptr;               // every call is recorded here; null: not recorded
  std::shared_ptr<StatusStore> status;  // null: timeouts do not show other ranks' status
  std::string backend_note;             // why no faster backend was chosen; may be empty
};

// The fields of GroupOptions with these names.
struct GroupOwner {
  device::Device* device = nullptr;
  Ledger* ledger = nullptr;
  Spans* spans = nullptr;
};

struct CallOptions {
  Label label;
  // Hash of the call's content beyond names and shapes, such as the ids of the gathered parameters.
  // Compared between ranks.
  std::uint64_t content_hash = 0;
  device::Stream* stream = nullptr;
  // The input may be read only after this as well: for input that a host thread writes (a read from
  // disk, an update). The group waits for it, not the caller. Its failure is the call's failure.
  device::Pending ready;
  std::shared_ptr<const void> keep_alive;
  // Set when all ranks have started this call with equal tags. From then on completion depends only
  // on streams and the network, so waiting for it cannot deadlock. A stream-ordered backend sets it
  // at once, because waiting there blocks no thread. Never set if the tags differ. May be null.
  std::shared_ptr<std::atomic<bool>> met;
  // Codec of a reduce-scatter with fp32, bf16 or fp16 input: each piece, this rank's own included,
  // is encoded once, and decoded once where it is added. Null: elements travel as they are.
  // All-gathers have a codec per tensor (Gather); other calls have none. Outlives the call.
  const Codec* codec = nullptr;
};

// Wires that an all-gather leaves as they are, beside what they decode to: [first, first + num) of
// those that arrive, in the order of ranks and wires, this rank's own too, behind each other at
// `to`, in memory of the device or of the host. Other ranks need not keep any.
struct KeptWires {
  std::byte* to = nullptr;
  int first = 0;
  int num = 0;
};

// One tensor of an all-gather: `shard_numel` elements from every rank, written in rank order.
struct Gather {
  const void* shard = nullptr;  // may be this rank's own slot in `full`
  void* full = nullptr;
  std::int64_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view name = {};  // compared, and used in messages, like a label
  // Null: elements travel as they are. Otherwise `shard` is wires_per_rank consecutive wires of
  // shard_numel elements each, outside of `full`, and `full` gets size() * wires_per_rank pieces of
  // shard_numel decoded elements, in the order of ranks and wires. Outlives the call.
  const Codec* codec = nullptr;
  int wires_per_rank = 1;  // more than 1: wires of several ranks, from an earlier gather
  KeptWires kept = {};     // of an all-gather with a codec
};

struct HostGather {
  Pending done;
  std::shared_ptr<const std::byte> bytes;  // pieces of all ranks, in rank order, once `done`
};

// Bytes that this rank has sent in a group. `payload` equals the closed forms in
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
  // Input of the functions in staging.h.
  CallMemory call_memory() const {
    return copied_from_ != nullptr   ? CallMemory::kCopied
           : backend_->reads_peers() ? CallMemory::kShared
                                     : CallMemory::kReached;
  }

  HeldMemory held_memory() const { return backend_->held_memory(); }

  [[nodiscard]] Pending start_all_gather(std::span<const Gather> tensors,
                                         const CallOptions& options = {});
  // The same call with one Pending per tensor, in order. Waiting for one does not wait for the
  // others where the backend allows it (packed tensors share one; on a stream all do). A failure
  // fails every tensor that has not arrived.
  [[nodiscard]] std::vector<Pending> start_all_gathers(std::span<const Gather> tensors,
                                                       const CallOptions& options = {});
  // An all-gather whose result only the ranks with wants[r] != 0 receive; on the others `full` may
  // be null. `wants` has an entry per rank and is the same on all ranks. If no entry is set, the
  // call is a barrier.
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

  // All-gather of a few bytes of host memory, whatever the group's device; `mine` is copied, and
  // has the same size on every rank. It involves no device: in a stream-ordered group it ends as
  // soon as all ranks have started it, even if the device still works on earlier calls.
  [[nodiscard]] HostGather start_gather_host(std::span<const std::byte> mine,
                                             const CallOptions& options = {});
  // The same for a broadcast from `root`. Blocks.
  void broadcast_host(void* data, std::size_t bytes, int root, const CallOptions& options = {});

  // Blocks until all ranks have started every call that this rank has started so far, with equal
  // tags; throws what the calls' Pendings would if tags differ. In a stream-ordered group it waits
  // for the other ranks' host threads, never for a device: work enqueued afterwards depends on
  // agreed collectives only. Elsewhere it waits for the calls to end, which implies agreement.
  void wait_agreed();

  // Fails every call in flight and every later one, here and, as a consequence, on the other ranks,
  // which get `reason` if the backend can send it. For an owner that is destroyed and cannot wait
  // for the other ranks. When it returns, the memory of calls may be freed, as after any failure.
  // No effect in a group that has failed or has one rank.
  void abort(const std::string& reason) noexcept;

  // A group over the ranks that passed the same color, in ascending rank order. Blocks.
  std::unique_ptr<Group> split(int color, const std::string& name) {
    return split(color, name, owner());
  }
  // The same, with another owner's device, ledger and spans.
  std::unique_ptr<Group> split(int color, const std::string& name, const GroupOwner& owner) {
    return split_by({color, 0}, name, owner);
  }
  // The same, with ranks ordered by ascending key, then by rank.
  struct Place {
    std::int64_t color = 0;
    std::int64_t key = 0;
  };
  std::unique_ptr<Group> split_by(const Place& place, const std::string& name,
                                  const GroupOwner& owner);
  // The device, ledger and spans of GroupOptions; may be null.
  GroupOwner owner() const { return {options_.device, options_.ledger, options_.spans}; }
  // True: calls are work of the streams of the owner's device (Backend::stream_ordered()).
  bool is_stream_ordered() const { return backend_->stream_ordered(); }

  // Bounds the staging of this rank's calls: from the next launch on they take it from one region
  // of `bytes`, which is allocated here and charged as exactly that. A call that does not fit waits
  // for earlier ones (staging.h says why that ends); a call that needs more than the whole region
  // gets a separate allocation. 0: buffers are kept as calls need them, the initial state. Not a
  // collective. Waits for the calls that hold staging now. No effect where the memory of a call
  // belongs to a stream (NCCL, a world of one). Groups that are split off do not inherit it.
  void reserve_staging(std::size_t bytes) { staging_.reserve(bytes); }

  WireBytes wire_bytes() const { return {payload_bytes_, control_bytes_, num_calls_}; }

 private:
  // Makes the common part of a call. `tag` has operation, shape and bytes. `words` null: the
  // label's words.
  QueuedCall prepare(CallTag tag, const CallOptions& options,
                     std::shared_ptr<const CallWords> words = nullptr);
  // Counts the call and hands it to the queue, or enqueues its phases on its stream.
  // `payload_bytes` is what this rank sends; the closed forms of docs/communication.md.
  Pending start(QueuedCall queued, std::size_t payload_bytes);
  Pending run_on_stream(const QueuedCall& queued);
  device::Stream* stream_of(const CallOptions& options) const;
  void hold_until_done(const Pending& pending, const std::shared_ptr<const void>& keep_alive);
  // Adds the call's staging, which is taken before its phases run. It is kept as long as the call,
  // even while that is stuck in the network.
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

  // Copies and fills between the call's memory and its staging, in the call's order. In a phase of
  // a queued call they are done on return.
  Pending copy(void* to, const void* from, std::size_t bytes, device::Stream* stream);
  Pending zero(void* to, std::size_t bytes, device::Stream* stream);
  // The stream on which a codec works for a call of `stream`; null: the calling thread.
  device::Stream* codec_stream(device::Stream* stream) const {
    if (stream == nullptr && backend_->stream_ordered() && options_.device != nullptr) {
      return &options_.device->stream(device::StreamKind::kCompute);
    }
    return backend_->stream_ordered() ? stream
           : is_copied()              ? &copied_from_->stream(device::StreamKind::kComm)
                                      : nullptr;
  }
  // Finishes work of a codec: in a phase of a queued call it is done on return.
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
  // Null if nothing is recorded.
  Spans* spans() const {
    return options_.spans != nullptr && options_.spans->enabled() ? options_.spans : nullptr;
  }

  const std::unique_ptr<Backend> backend_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const GroupOptions options_;
  device::Device* const copied_from_;  // null: the backend reaches the memory passed to calls
  Staging staging_;
  std::uint64_t sequence_ = 0;
  std::uint64_t num_splits_ = 0;
  std::vector<std::pair<Pending, std::shared_ptr<const void>>> held_;  // see hold_until_done()

  std::atomic<std::uint64_t> payload_bytes_{0};
  std::atomic<std::uint64_t> control_bytes_{0};
  std::atomic<std::uint64_t> num_calls_{0};

  const int num_exceptions_ = std::uncaught_exceptions();
  Watchdog watchdog_;
  std::unique_ptr<CallQueue> queue_;  // null: a world of one. Last: its threads use the above
};

namespace detail_group {

// Bytes of `numel` elements; ConfigError if that, times `times`, is not a valid size.
std::size_t checked_bytes(std::int64_t numel, DType dtype, int times, const char* what);
void check_pointer(const void* data, std::size_t bytes, const char* what);
// ConfigError unless such elements can be encoded.
void check_codec(const Codec& codec, DType dtype, const char* what);

}  // namespace detail_group
}  // namespace tessera::comm
