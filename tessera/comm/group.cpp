#include "tessera/comm/group.h"

#include <tuple>

#include "tessera/comm/group_impl.h"
#include "tessera/comm/solo_backend.h"

namespace tessera::comm {
namespace {

using detail_group::check_pointer;
using detail_group::checked_bytes;

// Bytes of the host where a backend reaches them. Only one whose memory is a device's does not.
class Reached {
 public:
  Reached(const Backend& backend, device::Device* device, void* data, std::size_t bytes)
      : device_(device), host_(data), bytes_(bytes) {
    if (device != nullptr && device->is_discrete() && backend.stream_ordered()) {
      copy_ = device->allocate(Tier::kDevice, bytes, Role::kStaging);
      copy(copy_.data(), host_);
    }
  }

  std::byte* data() const {
    return copy_.data() != nullptr ? copy_.data() : static_cast<std::byte*>(host_);
  }
  // Once the call is done.
  void read_back() const {
    if (copy_.data() != nullptr) {
      copy(host_, copy_.data());
    }
  }

 private:
  void copy(void* to, const void* from) const {
    device_->start_copy(to, from, bytes_, device_->stream(device::StreamKind::kComm)).wait();
  }

  device::Device* const device_;
  void* const host_;
  const std::size_t bytes_;
  device::Memory copy_;
};

}  // namespace

Group::Group(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
             GroupOptions options)
    : impl_(std::make_unique<Impl>(std::move(backend), std::move(name), std::move(world_ranks),
                                   std::move(options))) {}

Group::~Group() = default;

int Group::rank() const { return impl_->rank(); }
int Group::size() const { return impl_->size(); }
const std::string& Group::name() const { return impl_->name_; }
std::string_view Group::backend_name() const { return impl_->backend_->name(); }
CallMemory Group::call_memory() const { return impl_->call_memory(); }

WireBytes Group::wire_bytes() const {
  return {impl_->payload_bytes_, impl_->control_bytes_, impl_->num_calls_};
}

void Group::reserve_staging(std::size_t bytes) { impl_->staging_.reserve(bytes); }

Pending Group::start_broadcast(void* data, std::int64_t numel, DType dtype, int root,
                               const CallOptions& options) {
  const std::size_t bytes = checked_bytes(numel, dtype, size(), "broadcast");
  check_pointer(data, bytes, "broadcast");
  TESSERA_CHECK(root >= 0 && root < size(), ConfigError, "broadcast: root=", root,
                " is not a rank of group '", name(), "' of ", size());
  const std::uint64_t shape = hash_bytes(&numel, sizeof(numel), 0);
  QueuedCall queued = impl_->prepare(Op::kBroadcast, shape, bytes, 1, dtype, options, root);
  Impl* impl = impl_.get();
  if (bytes > 0 && !impl->is_copied()) {
    queued.phases.push_back({true, [impl, data, bytes, root, call = queued.call] {
                               return impl->backend_->start_broadcast(data, bytes, root, call);
                             }});
  } else if (bytes > 0) {
    const auto staging =
        impl->add_staging(queued, broadcast_staging_bytes(bytes, impl->call_memory()));
    const bool sends = root == rank();
    queued.phases.push_back(
        {true, [impl, data, bytes, root, staging, sends, call = queued.call] {
           if (sends) {
             std::ignore = impl->copy(staging->data(), data, bytes, call.stream);
           }
           return impl->backend_->start_broadcast(staging->data(), bytes, root, call);
         }});
    if (!sends) {
      queued.phases.push_back({false, [impl, data, bytes, staging, call = queued.call] {
                                 return impl->copy(data, staging->data(), bytes, call.stream);
                               }});
    }
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
  Impl* impl = impl_.get();
  if (bytes > 0 && !impl->is_copied()) {
    queued.phases.push_back({true, [impl, send, receive, bytes, call = queued.call] {
                               return impl->backend_->start_all_to_all(
                                   {send, receive, bytes, bytes, bytes}, call);
                             }});
  } else if (bytes > 0) {
    // What is received lies first in the staging, the copy of what is sent behind it.
    const auto staging =
        impl->add_staging(queued, all_to_all_staging_bytes(bytes, size(), impl->call_memory()));
    const std::size_t all = bytes * static_cast<std::size_t>(size());
    queued.phases = {{true,
                      [impl, send, bytes, all, staging, call = queued.call] {
                        std::byte* const sent = staging->data() + staging_room(all);
                        std::ignore = impl->copy(sent, send, all, call.stream);
                        return impl->backend_->start_all_to_all(
                            {sent, staging->data(), bytes, bytes, bytes}, call);
                      }},
                     {false, [impl, receive, all, staging, call = queued.call] {
                        return impl->copy(receive, staging->data(), all, call.stream);
                      }}};
  }
  return impl_->start(std::move(queued), bytes * impl_->num_peers());
}

Pending Group::start_barrier(const CallOptions& options) {
  return impl_->start(impl_->prepare(Op::kBarrier, 0, 0, 0, DType::kUInt8, options), 0);
}

void Group::broadcast_host(void* data, std::size_t bytes, int root, const CallOptions& options) {
  const Reached reached(*impl_->backend_, impl_->options_.device, data, bytes);
  start_broadcast(reached.data(), static_cast<std::int64_t>(bytes), DType::kUInt8, root, options)
      .wait();
  reached.read_back();
}

HostGather Group::start_gather_host(std::span<const std::byte> mine, const CallOptions& options) {
  device::Device* const device = impl_->options_.device;
  const std::size_t all_bytes = mine.size() * static_cast<std::size_t>(size());
  const std::size_t own = mine.size() * static_cast<std::size_t>(rank());
  const auto numel = static_cast<std::int64_t>(mine.size());
  CallOptions call = options;
  if (impl_->queue_ || device == nullptr || !device->is_discrete()) {
    const auto all = std::make_shared<std::vector<std::byte>>(all_bytes);
    std::copy(mine.begin(), mine.end(), all->begin() + static_cast<std::ptrdiff_t>(own));
    call.keep_alive = all;
    const Gather gather{all->data() + own, all->data(), numel, DType::kUInt8};
    Pending done = start_all_gather({&gather, 1}, call);
    return {std::move(done), {all, all->data()}};
  }
  struct Copies {
    device::Memory host;
    device::Memory device;
  };
  const auto copies = std::make_shared<Copies>();
  copies->host = device->allocate(Tier::kPinned, all_bytes, Role::kStaging);
  copies->device = device->allocate(Tier::kDevice, all_bytes, Role::kStaging);
  std::byte* const all = copies->device.data();
  device::Stream& stream = device->stream(device::StreamKind::kComm);
  std::copy(mine.begin(), mine.end(), copies->host.data() + own);
  std::ignore = device->start_copy(all + own, copies->host.data() + own, mine.size(), stream);
  call.stream = &stream;
  call.keep_alive = copies;
  const Gather gather{all + own, all, numel, DType::kUInt8};
  std::ignore = start_all_gather({&gather, 1}, call);
  Pending done = device->start_copy(copies->host.data(), all, all_bytes, stream);
  impl_->hold_until_done(done, copies);
  return {std::move(done), {copies, copies->host.data()}};
}

GroupOwner Group::owner() const {
  return {impl_->options_.device, impl_->options_.ledger, impl_->options_.spans};
}

bool Group::is_stream_ordered() const { return impl_->backend_->stream_ordered(); }

std::unique_ptr<Group> Group::split(int color, const std::string& name) {
  return split(color, name, owner());
}

std::unique_ptr<Group> Group::split(int color, const std::string& name, const GroupOwner& owner) {
  const auto num_ranks = static_cast<std::size_t>(size());
  std::vector<std::int64_t> colors(num_ranks, 0);
  colors[static_cast<std::size_t>(rank())] = color;
  const std::size_t bytes = num_ranks * sizeof(std::int64_t);
  const Reached reached(*impl_->backend_, impl_->options_.device, colors.data(), bytes);
  const std::size_t own = static_cast<std::size_t>(rank()) * sizeof(std::int64_t);
  const Gather gather{reached.data() + own, reached.data(), 1, DType::kInt64};
  CallOptions options;
  options.label.unit = name;
  start_all_gather({&gather, 1}, options).wait();
  reached.read_back();

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
                                         ? make_solo_backend(owner.device)
                                         : impl_->backend_->split(members, full_name);
  GroupOptions made = impl_->options_;
  made.device = owner.device;
  made.ledger = owner.ledger;
  made.spans = owner.spans;
  return std::make_unique<Group>(std::move(backend), full_name, std::move(world_ranks),
                                 std::move(made));
}

Groups make_groups(std::unique_ptr<Group> world, int shard_size) {
  Topology topology(world->size(), world->rank(), shard_size);
  std::unique_ptr<Group> shard = world->split(topology.replica_rank(), "shard");
  std::unique_ptr<Group> replica = world->split(topology.shard_rank(), "replica");
  return {topology, std::move(world), std::move(shard), std::move(replica)};
}

}  // namespace tessera::comm
