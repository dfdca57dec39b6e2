// Ranks that communicate with each other: the seam to the network. c10d is named nowhere above it.
//
// Every method that communicates is a collective: all ranks of the group call the same methods in
// the same order. What fixes that order is the caller (registration, trace, agreement), never time.
// Ranks check it: each call carries a tag (tag.h) that is compared before its data moves, and
// a mismatch is an error on every rank that names the rank that differs and both calls with their
// units and parameters.
//
// Numbers: reductions are exact in the sense of the design: all-to-all, then a sum in rank order in
// fp32, rounded once. The same input gives the same bits on every backend, for every bucket size
// and timing. all_reduce is reduce-scatter and all-gather of the same sum.
//
// Asynchrony: a call returns at once. Its memory must stay valid until the Pending is done (or give
// `keep_alive`, which is held also when a failed call is still stuck inside the network). If
// `stream` is given, the call reads its input after what that stream has been given so far.
//
// Failures: a call that takes longer than the timeout, loses a peer or meets another call fails
// with a CommError that says what was waited for, for which unit and parameter, and which ranks
// have not come. The first failure poisons the group: every later call repeats it.
//
// Threads: start_* from one thread at a time. A worker of the group finishes calls (adds, unpacks,
// watches the time) in the order in which they were started. Destroying a Group waits for what is
// in flight, unless an exception is the reason for it: then calls in flight are given up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/board.h"
#include "tessera/comm/staging_bytes.h"
#include "tessera/comm/tag.h"
#include "tessera/comm/topology.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"
#include "tessera/core/spans.h"

namespace tessera::comm {

struct GroupOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Pieces smaller than this travel together in one message.
  std::size_t pack_below_bytes = std::size_t{64} * 1024;
  // How often a rank says what it is doing, and looks whether another one has failed.
  std::chrono::milliseconds beat{1000};
  Ledger* ledger = nullptr;  // staging is charged here; null: not charged
  // Whose memory is passed in; null: host memory. Outlives the group. If it has memory of its own
  // and the network reaches the host's only (Gloo, threads), calls pass through pinned staging: the
  // group's own threads copy what is sent down and what has come up, and nothing blocks the caller.
  // Memory of the host may then be passed in, too.
  device::Device* device = nullptr;
  Spans* spans = nullptr;        // every call is recorded here; null: not recorded
  std::shared_ptr<Board> board;  // null: waits are explained without the other ranks' words
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
};

// One tensor of an all-gather: `shard_numel` elements from every rank, written in rank order.
struct Gather {
  const void* shard = nullptr;  // may be this rank's own slot in `full`
  void* full = nullptr;
  std::int64_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view name = {};  // compared, and used in messages, like a label
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
  // `name` is the same on all ranks, and unique among the groups that share a board.
  // `world_ranks[r]` is the world rank of rank r.
  Group(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
        GroupOptions options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  const std::string& name() const;
  std::string_view backend_name() const;
  // For plans of staging.
  CallMemory call_memory() const;

  [[nodiscard]] Pending start_all_gather(std::span<const Gather> tensors,
                                         const CallOptions& options = {});
  // The same call with one Pending per tensor, in order: waiting for one does not wait for the
  // others where the backend allows it (small tensors travel together; on a stream all share one).
  // A failure is the failure of every tensor that has not come.
  [[nodiscard]] std::vector<Pending> start_all_gathers(std::span<const Gather> tensors,
                                                       const CallOptions& options = {});
  // An all-gather whose result only the ranks with wants[r] != 0 get; on the others `full` may be
  // null. `wants` has an entry per rank and is the same on all. If nobody wants it, ranks only
  // meet.
  [[nodiscard]] Pending start_gather_to(std::span<const Gather> tensors,
                                        std::span<const std::uint8_t> wants,
                                        const CallOptions& options = {});
  // input: size() pieces of `shard_numel` elements of `dtype`; output: this rank's piece of the
  // sum, in `output_dtype` (fp32, or `dtype`).
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

  // start_broadcast() of a few bytes of the host, whatever memory other calls are given. Blocks.
  void broadcast_host(void* data, std::size_t bytes, int root, const CallOptions& options = {});

  // All-gather of a few bytes of the host, whatever memory other calls are given; `mine` is copied,
  // and as long on every rank. Does not wait for the device where the network is the host's.
  [[nodiscard]] HostGather start_gather_host(std::span<const std::byte> mine,
                                             const CallOptions& options = {});

  // A group over the ranks that passed the same color, in ascending rank order. Blocks.
  std::unique_ptr<Group> split(int color, const std::string& name);
  // The same, for another owner's memory and books.
  std::unique_ptr<Group> split(int color, const std::string& name, const GroupOwner& owner);
  // Whose memory is passed in; all null where nobody said.
  GroupOwner owner() const;
  // Calls are work of the streams of the owner's device, and of no other (backend.h).
  bool is_stream_ordered() const;

  // Bounds what this rank's calls hold as scratch: from the next launch on they take it from one
  // region of `bytes`, which is allocated here and charged as exactly that. Calls that find no room
  // wait for the ones before them (staging.h says why that ends); a call that needs more than the
  // whole region has memory of its own while it lasts. staging_bytes.h says what calls need. 0:
  // buffers are kept as calls need them, as before the first time. Not a collective. Waits for the
  // calls that hold scratch now. Without effect where a call's memory belongs to a stream (NCCL, a
  // world of one). Groups that are split off do not inherit it.
  void reserve_staging(std::size_t bytes);

  WireBytes wire_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The three groups of a run, made from the world in a fixed order.
struct Groups {
  Topology topology;
  std::unique_ptr<Group> world;
  std::unique_ptr<Group> shard;
  std::unique_ptr<Group> replica;
};
Groups make_groups(std::unique_ptr<Group> world, int shard_size = 0);

}  // namespace tessera::comm
