#include "tessera/comm/group.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <tuple>

#include "tessera/comm/call_queue.h"
#include "tessera/comm/solo_backend.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/watch.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kPackAlignment = 16;

// Up to this many bytes from all ranks together, an all-reduce gathers everything and adds at home:
// one round trip instead of two, and the same bits.
constexpr std::size_t kSmallAllReduceBytes = 64 * 1024;

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::size_t checked_bytes(std::int64_t numel, DType dtype, int times, const char* what) {
  TESSERA_CHECK(numel >= 0, ConfigError, what, ": ", numel, " elements; must not be negative");
  const auto limit = std::numeric_limits<std::int64_t>::max() /
                     (static_cast<std::int64_t>(bytes_of(dtype)) * times);
  TESSERA_CHECK(numel <= limit, ConfigError, what, ": ", numel, " elements of ", to_string(dtype),
                " times ", times, " ranks do not fit the address space");
  return static_cast<std::size_t>(numel) * bytes_of(dtype);
}

void check_pointer(const void* data, std::size_t bytes, const char* what) {
  TESSERA_CHECK(bytes == 0 || data != nullptr, ConfigError, what, ": null memory for ", bytes,
                " bytes");
}

}  // namespace

class Group::Impl {
 public:
  Impl(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
       GroupOptions options)
      : backend_(std::move(backend)),
        name_(std::move(name)),
        world_ranks_(std::move(world_ranks)),
        options_(std::move(options)),
        staging_(*backend_, options_.ledger),
        watch_(WatchOptions{name_, backend_->rank(), world_ranks_, options_.timeout, options_.beat,
                            options_.board}) {
    TESSERA_CHECK(static_cast<int>(world_ranks_.size()) == backend_->size(), ConfigError,
                  "group '", name_, "': ", world_ranks_.size(), " names for ", backend_->size(),
                  " ranks");
    if (!backend_->stream_ordered()) {
      queue_ = std::make_unique<CallQueue>(*backend_, watch_, world_ranks_, spans());
    }
  }

  // An exception on its way through the owner of the group must not wait for calls in flight: the
  // other ranks will not come to them, and until it is caught nobody knows of it.
  ~Impl() {
    if (queue_ && std::uncaught_exceptions() > num_exceptions_) {
      queue_->abandon(detail::concat("group '", name_, "' was given up: this rank is failing"));
    }
  }

  // What every call starts with: its tag, and the backend's copy of the options.
  QueuedCall prepare(Op op, std::uint64_t shape_hash, std::uint64_t total_bytes,
                     std::size_t num_tensors, DType dtype, const CallOptions& options,
                     int root = 0) {
    QueuedCall queued;
    CallTag& tag = queued.call.tag;
    tag.sequence = ++sequence_;
    tag.op = op;
    tag.dtype = dtype;
    tag.root = static_cast<std::uint16_t>(root);
    tag.num_tensors = static_cast<std::uint32_t>(num_tensors);
    tag.total_bytes = total_bytes;
    tag.shape_hash = shape_hash;
    tag.label_hash = hash_bytes(
        options.label.parameter.data(), options.label.parameter.size(),
        hash_bytes(options.label.unit.data(), options.label.unit.size(), 0));
    queued.text = describe(tag, options.label.unit, options.label.parameter);
    if (Spans* traced = spans()) {
      queued.span = {static_cast<std::int64_t>(total_bytes),
                     static_cast<std::int64_t>(tag.sequence), traced->intern(options.label.unit),
                     traced->intern(options.label.parameter)};
      queued.start_ns = traced->now_ns();
    }
    queued.call.keep_alive = options.keep_alive;
    queued.call.stream = options.stream;
    if (options.stream != nullptr && queue_) {
      queued.ready = options.stream->record();
    }
    return queued;
  }

  // `payload_bytes` is what this rank sends; the closed forms of docs/communication.md.
  Pending start(QueuedCall queued, std::size_t payload_bytes) {
    payload_bytes_ += payload_bytes;
    ++num_calls_;
    if (tags_meet()) {
      control_bytes_ += sizeof(CallTag) * static_cast<std::size_t>(size() - 1);
    }
    if (queued.phases.empty()) {
      // Nothing to move: the ranks still meet, so that a mismatch does not go unseen.
      queued.phases.push_back(
          {true, [this, call = queued.call] {
             return tags_meet() ? Pending() : backend_->start_all_gather({}, call);
           }});
    }
    return queue_ ? queue_->start(std::move(queued)) : run_on_stream(std::move(queued));
  }

  // Keeps scratch alive as long as the call, also when it is stuck in the network.
  std::shared_ptr<std::byte> take_staging(QueuedCall& queued, std::size_t bytes) {
    auto staging = staging_.take(bytes, queued.call.stream);
    queued.call.keep_alive = std::make_shared<
        std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
        queued.call.keep_alive, staging);
    return staging;
  }

  // True: exchanging the tags is already a meeting of all ranks.
  bool tags_meet() const { return queue_ && !backend_->compares_tags(); }

  // A copy of the call's own memory, in the call's order.
  Pending copy(void* to, const void* from, std::size_t bytes, device::Stream* stream) {
    if (stream != nullptr && !queue_) {
      return options_.device != nullptr
                 ? options_.device->start_copy(to, from, bytes, *stream)
                 : stream->enqueue([=] { std::memcpy(to, from, bytes); });
    }
    std::memcpy(to, from, bytes);
    return {};
  }

  Pending zero(void* to, std::size_t bytes, device::Stream* stream) {
    if (stream != nullptr && !queue_) {
      return options_.device != nullptr ? options_.device->start_fill(to, 0, bytes, *stream)
                                        : stream->enqueue([=] { std::memset(to, 0, bytes); });
    }
    std::memset(to, 0, bytes);
    return {};
  }

  // Null when nothing is to be recorded.
  Spans* spans() const {
    return options_.spans != nullptr && options_.spans->enabled() ? options_.spans : nullptr;
  }

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  std::size_t num_peers() const { return static_cast<std::size_t>(backend_->size() - 1); }

  const std::unique_ptr<Backend> backend_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const GroupOptions options_;
  Staging staging_;
  std::uint64_t num_splits_ = 0;

  std::atomic<std::uint64_t> payload_bytes_{0};
  std::atomic<std::uint64_t> control_bytes_{0};
  std::atomic<std::uint64_t> num_calls_{0};

 private:
  // Stream-ordered backends need no worker: each phase is enqueued behind the one before it.
  Pending run_on_stream(QueuedCall queued) {
    device::Stream* stream = queued.call.stream;
    Pending last;
    for (const Phase& phase : queued.phases) {
      last = phase.launch();
      if (stream == nullptr) {
        last.wait();
      }
    }
    if (Spans* traced = spans()) {  // the time to enqueue it; the stream's own time is the device's
      traced->record(to_string(queued.call.tag.op).data(), queued.start_ns, traced->now_ns(),
                     queued.span);
    }
    return last;
  }

  const int num_exceptions_ = std::uncaught_exceptions();
  std::uint64_t sequence_ = 0;
  Watch watch_;
  std::unique_ptr<CallQueue> queue_;  // last: its worker uses everything above
};

Group::Group(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
             GroupOptions options)
    : impl_(std::make_unique<Impl>(std::move(backend), std::move(name), std::move(world_ranks),
                                   std::move(options))) {}

Group::~Group() = default;

int Group::rank() const { return impl_->rank(); }
int Group::size() const { return impl_->size(); }
const std::string& Group::name() const { return impl_->name_; }
std::string_view Group::backend_name() const { return impl_->backend_->name(); }

WireBytes Group::wire_bytes() const {
  return {impl_->payload_bytes_, impl_->control_bytes_, impl_->num_calls_};
}

Pending Group::start_all_gather(std::span<const Gather> tensors, const CallOptions& options) {
  std::vector<GatherBytes> direct;
  std::vector<GatherBytes> packed;
  std::size_t packed_bytes = 0;
  std::size_t shard_bytes = 0;
  std::uint64_t shape = 0;
  const bool may_pack = !impl_->backend_->stream_ordered();
  for (const Gather& tensor : tensors) {
    const std::size_t bytes =
        checked_bytes(tensor.shard_numel, tensor.dtype, size(), "all_gather");
    check_pointer(tensor.shard, bytes, "all_gather: shard");
    check_pointer(tensor.full, bytes, "all_gather: full");
    shape = hash_bytes(&tensor.shard_numel, sizeof(tensor.shard_numel), shape);
    shape = hash_bytes(&tensor.dtype, sizeof(tensor.dtype), shape);
    shard_bytes += bytes;
    if (bytes == 0) {
      continue;
    }
    if (may_pack && bytes < impl_->options_.pack_below_bytes) {
      packed.push_back({tensor.shard, tensor.full, bytes});
      packed_bytes += round_up(bytes, kPackAlignment);
    } else {
      direct.push_back({tensor.shard, tensor.full, bytes});
    }
  }
  if (packed.size() == 1) {  // nothing to save: straight into its place
    direct.push_back(packed.front());
    packed.clear();
    packed_bytes = 0;
  }
  std::size_t payload = packed_bytes;
  for (const GatherBytes& part : direct) {
    payload += part.shard_bytes;
  }
  QueuedCall queued = impl_->prepare(Op::kAllGather, shape, shard_bytes, tensors.size(),
                                     tensors.empty() ? DType::kUInt8 : tensors[0].dtype, options);
  if (packed.empty()) {
    if (!direct.empty()) {
      queued.phases.push_back({true, [impl = impl_.get(), direct, call = queued.call] {
                                 return impl->backend_->start_all_gather(direct, call);
                               }});
    }
    return impl_->start(std::move(queued), payload * impl_->num_peers());
  }

  const auto num_ranks = static_cast<std::size_t>(size());
  std::byte* all = impl_->take_staging(queued, packed_bytes * num_ranks).get();
  std::byte* own = all + static_cast<std::size_t>(rank()) * packed_bytes;
  queued.phases.push_back(
      {true, [impl = impl_.get(), direct, packed, packed_bytes, all, own, call = queued.call] {
         std::byte* cursor = own;
         for (const GatherBytes& part : packed) {
           std::memcpy(cursor, part.shard, part.shard_bytes);
           // What travels is defined to the last byte, gaps included.
           const std::size_t room = round_up(part.shard_bytes, kPackAlignment);
           std::memset(cursor + part.shard_bytes, 0, room - part.shard_bytes);
           cursor += room;
         }
         std::vector<GatherBytes> parts = direct;
         parts.push_back({own, all, packed_bytes});
         return impl->backend_->start_all_gather(parts, call);
       }});
  queued.phases.push_back({false, [packed, packed_bytes, all, num_ranks] {
                             for (std::size_t r = 0; r < num_ranks; ++r) {
                               const std::byte* cursor = all + r * packed_bytes;
                               for (const GatherBytes& part : packed) {
                                 auto* slot =
                                     static_cast<std::byte*>(part.full) + r * part.shard_bytes;
                                 std::memcpy(slot, cursor, part.shard_bytes);
                                 cursor += round_up(part.shard_bytes, kPackAlignment);
                               }
                             }
                             return Pending();
                           }});
  return impl_->start(std::move(queued), payload * impl_->num_peers());
}

Pending Group::start_reduce_scatter(const void* input, void* output, std::int64_t shard_numel,
                                    DType dtype, DType output_dtype, const CallOptions& options) {
  const std::size_t bytes = checked_bytes(shard_numel, dtype, size(), "reduce_scatter");
  check_pointer(input, bytes, "reduce_scatter: input");
  check_pointer(output, bytes, "reduce_scatter: output");
  check_reduction(dtype, output_dtype);
  const std::uint64_t shape = hash_bytes(&shard_numel, sizeof(shard_numel), 0);
  QueuedCall queued = impl_->prepare(Op::kReduceScatter, shape, bytes, 1, dtype, options);
  if (bytes > 0) {
    const void* parts = input;
    if (size() > 1) {
      std::byte* received =
          impl_->take_staging(queued, bytes * static_cast<std::size_t>(size())).get();
      queued.phases.push_back({true, [impl = impl_.get(), input, received, bytes,
                                      call = queued.call] {
                                 return impl->backend_->start_all_to_all(input, received, bytes,
                                                                         call);
                               }});
      parts = received;
    }
    const RankParts ranks{parts, dtype, size(), static_cast<std::size_t>(shard_numel)};
    queued.phases.push_back(
        {false, [impl = impl_.get(), ranks, output, output_dtype, call = queued.call] {
           return impl->backend_->start_reduce(
               ranks, output, output_dtype, Reduction::kSum,
               impl->backend_->stream_ordered() ? call.stream : nullptr);
         }});
  }
  return impl_->start(std::move(queued), bytes * impl_->num_peers());
}

Pending Group::start_all_reduce(void* data, std::int64_t numel, DType dtype, Reduction reduction,
                                const CallOptions& options) {
  const std::size_t bytes = checked_bytes(numel, dtype, size(), "all_reduce");
  check_pointer(data, bytes, "all_reduce");
  std::uint64_t shape = hash_bytes(&numel, sizeof(numel), 0);
  shape = hash_bytes(&reduction, sizeof(reduction), shape);
  QueuedCall queued = impl_->prepare(Op::kAllReduce, shape, bytes, 1, dtype, options);
  if (bytes == 0 || size() == 1) {
    return impl_->start(std::move(queued), 0);
  }
  Impl* impl = impl_.get();
  const auto num_ranks = static_cast<std::size_t>(size());
  const auto reduce = [impl, dtype, reduction, num_ranks](const std::byte* parts, std::size_t count,
                                                          void* out, const Call& call) {
    const RankParts ranks{parts, dtype, static_cast<int>(num_ranks), count};
    return impl->backend_->start_reduce(ranks, out, dtype, reduction,
                                        impl->backend_->stream_ordered() ? call.stream : nullptr);
  };

  if (bytes * num_ranks <= kSmallAllReduceBytes) {
    std::byte* all = impl->take_staging(queued, bytes * num_ranks).get();
    queued.phases = {
        {true,
         [impl, data, all, bytes, call = queued.call] {
           const GatherBytes part{data, all, bytes};
           return impl->backend_->start_all_gather({&part, 1}, call);
         }},
        {false, [reduce, all, count = static_cast<std::size_t>(numel), data, call = queued.call] {
           return reduce(all, count, data, call);
         }}};
    return impl->start(std::move(queued), bytes * impl->num_peers());
  }

  // Reduce-scatter and all-gather of `num_ranks` equal pieces; the last ones are padded with zeros.
  const std::size_t count = (static_cast<std::size_t>(numel) + num_ranks - 1) / num_ranks;
  const std::size_t piece_bytes = count * bytes_of(dtype);
  const std::size_t padded_bytes = piece_bytes * num_ranks;
  const std::size_t padding_bytes = padded_bytes - bytes;
  std::byte* received = impl->take_staging(queued, padded_bytes).get();
  std::byte* padded = padding_bytes == 0 ? static_cast<std::byte*>(data)
                                         : impl->take_staging(queued, padded_bytes).get();
  std::byte* own = padded + static_cast<std::size_t>(rank()) * piece_bytes;
  queued.phases = {
      {true,
       [=, call = queued.call] {
         if (padding_bytes > 0) {
           std::ignore = impl->copy(padded, data, bytes, call.stream);
           std::ignore = impl->zero(padded + bytes, padding_bytes, call.stream);
         }
         return impl->backend_->start_all_to_all(padded, received, piece_bytes, call);
       }},
      {false, [=, call = queued.call] { return reduce(received, count, own, call); }},
      {true,
       [=, call = queued.call] {
         const GatherBytes part{own, padded, piece_bytes};
         return impl->backend_->start_all_gather({&part, 1}, call);
       }}};
  if (padding_bytes > 0) {
    queued.phases.push_back({false, [=, call = queued.call] {
                               return impl->copy(data, padded, bytes, call.stream);
                             }});
  }
  return impl->start(std::move(queued), 2 * piece_bytes * impl->num_peers());
}

Pending Group::start_broadcast(void* data, std::int64_t numel, DType dtype, int root,
                               const CallOptions& options) {
  const std::size_t bytes = checked_bytes(numel, dtype, size(), "broadcast");
  check_pointer(data, bytes, "broadcast");
  TESSERA_CHECK(root >= 0 && root < size(), ConfigError, "broadcast: root=", root,
                " is not a rank of group '", name(), "' of ", size());
  const std::uint64_t shape = hash_bytes(&numel, sizeof(numel), 0);
  QueuedCall queued = impl_->prepare(Op::kBroadcast, shape, bytes, 1, dtype, options, root);
  if (bytes > 0) {
    queued.phases.push_back({true, [impl = impl_.get(), data, bytes, root, call = queued.call] {
                               return impl->backend_->start_broadcast(data, bytes, root, call);
                             }});
  }
  return impl_->start(std::move(queued), impl_->backend_->broadcast_sent_bytes(bytes, root));
}

Pending Group::start_all_to_all(const void* send, void* receive, std::int64_t piece_numel,
                                DType dtype, const CallOptions& options) {
  const std::size_t bytes = checked_bytes(piece_numel, dtype, size(), "all_to_all");
  check_pointer(send, bytes, "all_to_all: send");
  check_pointer(receive, bytes, "all_to_all: receive");
  const std::uint64_t shape = hash_bytes(&piece_numel, sizeof(piece_numel), 0);
  QueuedCall queued = impl_->prepare(Op::kAllToAll, shape, bytes, 1, dtype, options);
  if (bytes > 0) {
    queued.phases.push_back({true, [impl = impl_.get(), send, receive, bytes, call = queued.call] {
                               return impl->backend_->start_all_to_all(send, receive, bytes, call);
                             }});
  }
  return impl_->start(std::move(queued), bytes * impl_->num_peers());
}

Pending Group::start_barrier(const CallOptions& options) {
  return impl_->start(impl_->prepare(Op::kBarrier, 0, 0, 0, DType::kUInt8, options), 0);
}

std::unique_ptr<Group> Group::split(int color, const std::string& name) {
  const auto num_ranks = static_cast<std::size_t>(size());
  std::vector<std::int64_t> colors(num_ranks, 0);
  colors[static_cast<std::size_t>(rank())] = color;
  const Gather gather{&colors[static_cast<std::size_t>(rank())], colors.data(), 1, DType::kInt64};
  CallOptions options;
  options.label.unit = name;
  start_all_gather({&gather, 1}, options).wait();

  std::vector<int> members;
  std::vector<int> world_ranks;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    if (colors[r] == color) {
      members.push_back(static_cast<int>(r));
      world_ranks.push_back(impl_->world_ranks_[r]);
    }
  }
  // The count makes the name new even if the caller's is not; it is the same on all ranks because
  // splits are collective.
  const std::string full_name =
      detail::concat(impl_->name_, "/", name, ".", ++impl_->num_splits_, ".", color);
  std::unique_ptr<Backend> backend = members.size() == 1
                                         ? make_solo_backend(impl_->options_.device)
                                         : impl_->backend_->split(members, full_name);
  return std::make_unique<Group>(std::move(backend), full_name, std::move(world_ranks),
                                 impl_->options_);
}

Groups make_groups(std::unique_ptr<Group> world, int shard_size) {
  Topology topology(world->size(), world->rank(), shard_size);
  std::unique_ptr<Group> shard = world->split(topology.replica_rank(), "shard");
  std::unique_ptr<Group> replica = world->split(topology.shard_rank(), "replica");
  return {topology, std::move(world), std::move(shard), std::move(replica)};
}

}  // namespace tessera::comm
