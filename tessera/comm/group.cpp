#include "tessera/comm/group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using detail_group::check_pointer;
using detail_group::checked_bytes;

// Whose memory the backend does not reach: a queue's network is the host's.
device::Device* device_to_copy_from(const Backend& backend, device::Device* device) {
  const bool is_reached = device == nullptr || !device->is_discrete();
  return is_reached || backend.stream_ordered() ? nullptr : device;
}

}  // namespace

std::size_t detail_group::checked_bytes(std::int64_t numel, DType dtype, int times,
                                        const char* what) {
  TESSERA_CHECK(numel >= 0, ConfigError, what, ": ", numel, " elements; must not be negative");
  const auto limit = std::numeric_limits<std::int64_t>::max() /
                     (static_cast<std::int64_t>(bytes_of(dtype)) * times);
  TESSERA_CHECK(numel <= limit, ConfigError, what, ": ", numel, " elements of ", to_string(dtype),
                " times ", times, " ranks do not fit the address space");
  return static_cast<std::size_t>(numel) * bytes_of(dtype);
}

void detail_group::check_pointer(const void* data, std::size_t bytes, const char* what) {
  TESSERA_CHECK(bytes == 0 || data != nullptr, ConfigError, what, ": null memory for ", bytes,
                " bytes");
}

void detail_group::check_codec(const Codec& codec, DType dtype, const char* what) {
  const bool is_encodable =
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  TESSERA_CHECK(is_encodable, ConfigError, what, ": ", to_string(dtype),
                " elements cannot travel as ", codec.name(), "; only fp32, bf16 and fp16 can");
}

Group::Group(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
             GroupOptions options)
    : backend_(std::move(backend)),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      options_(std::move(options)),
      copied_from_(device_to_copy_from(*backend_, options_.device)),
      staging_(*backend_, options_.ledger, copied_from_),
      watchdog_(WatchdogOptions{name_, backend_->rank(), world_ranks_, options_.timeout,
                                options_.heartbeat, options_.status}) {
  TESSERA_CHECK(static_cast<int>(world_ranks_.size()) == size(), ConfigError, "group '", name_,
                "': ", world_ranks_.size(), " names for ", size(), " ranks");
  const bool can_differ = size() > 1 || !backend_->compares_tags();
  if (!backend_->stream_ordered() || can_differ) {
    queue_ = std::make_unique<CallQueue>(*backend_, staging_, watchdog_, world_ranks_, spans());
  }
  if (options_.ledger != nullptr) {
    options_.ledger->charge(held_memory().tier, Role::kStaging, held_memory().bytes);
  }
}

// An exception on its way through the owner of the group must not wait for calls in flight: the
// other ranks will not join them, and until it is caught nobody knows of it.
Group::~Group() {
  if (queue_ && std::uncaught_exceptions() > num_exceptions_) {
    abort("this rank is failing");
  } else if (queue_) {
    queue_->close();
    watchdog_.end();
  }
  for (const auto& held : held_) {
    try {
      held.first.wait();
    } catch (...) {  // whoever waits for the call itself is told; here only the end matters
    }
  }
  if (options_.ledger != nullptr) {
    options_.ledger->discharge(held_memory().tier, Role::kStaging, held_memory().bytes);
  }
}

void Group::abort(const std::string& reason) noexcept {
  if (queue_) {
    queue_->abandon(detail::concat("group '", name_, "' was aborted: ", reason));
  }
}

// A call without a stream whose memory is a device's is work of the comm stream, which holds up
// nothing of the caller's.
device::Stream* Group::stream_of(const CallOptions& options) const {
  const bool needs_one = options.stream == nullptr && queue_ && backend_->stream_ordered() &&
                         options_.device != nullptr;
  return needs_one ? &options_.device->stream(device::StreamKind::kComm) : options.stream;
}

QueuedCall Group::prepare(CallTag tag, const CallOptions& options,
                          std::shared_ptr<const CallWords> words) {
  if (!words) {
    words = std::make_shared<CallWords>(options.label);
  }
  tag.sequence = ++sequence_;
  tag.label_hash = words->hash();
  tag.content_hash = options.content_hash;
  QueuedCall queued;
  queued.call = {tag,         std::move(words), options.keep_alive, stream_of(options),
                 options.met, world_ranks_};
  queued.text = describe(tag, options.label.unit, options.label.parameter);
  if (Spans* traced = spans()) {
    queued.span = {static_cast<std::int64_t>(tag.total_bytes),
                   static_cast<std::int64_t>(tag.sequence), traced->intern(options.label.unit),
                   traced->intern(options.label.parameter)};
    queued.start_ns = traced->now_ns();
  }
  if (!queue_ && options.stream != nullptr) {
    options.stream->wait(options.ready);
  } else if (!queue_) {
    options.ready.wait();
  } else if (options.stream != nullptr && !backend_->stream_ordered()) {
    queued.ready = options.stream->record();
    if (options.ready.state() != nullptr) {
      queued.ready = Pending::all({queued.ready, options.ready});
    }
  } else {
    queued.ready = options.ready;
  }
  return queued;
}

Pending Group::start(QueuedCall queued, std::size_t payload_bytes) {
  payload_bytes_ += payload_bytes;
  ++num_calls_;
  if (exchanges_tags()) {
    control_bytes_ += sizeof(CallTag) * num_peers();
  }
  if (queued.phases.empty() && !queued.host) {
    // Nothing to move: the call is still a barrier, so that a mismatch does not go unseen.
    queued.phases.push_back({true, [this, call = queued.call] {
                               return exchanges_tags() ? Pending()
                                                       : backend_->start_all_gather({}, call);
                             }});
  }
  return queue_ ? queue_->start(std::move(queued)) : run_on_stream(queued);
}

// Where nobody can differ no worker is needed: each phase is enqueued behind the one before it.
Pending Group::run_on_stream(const QueuedCall& queued) {
  device::Stream* stream = queued.call.stream;
  if (queued.call.met) {
    *queued.call.met = true;
  }
  if (queued.staging) {
    staging_.take(*queued.staging, stream);
  }
  Pending last;
  for (const Phase& phase : queued.phases) {
    last = phase.launch();
    if (stream == nullptr) {
      last.wait();
    }
  }
  hold_until_done(last, queued.call.keep_alive);
  if (Spans* traced = spans()) {  // the time to enqueue it; the stream's own time is the device's
    // The names are literals, so they end in zero.
    // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage)
    traced->record(to_string(queued.call.tag.op).data(), queued.start_ns, traced->now_ns(),
                   queued.span);
  }
  return last;
}

// A stream's work does not know what its caller wants kept, and a CUDA stream must not be given a
// function that frees memory: so it is kept here, and freed at the first call after its end.
void Group::hold_until_done(const Pending& pending, const std::shared_ptr<const void>& keep_alive) {
  std::erase_if(held_, [](const auto& held) { return held.first.done(); });
  if (keep_alive && !pending.done()) {
    held_.emplace_back(pending, keep_alive);
  }
}

std::shared_ptr<const StagingLease> Group::add_staging(QueuedCall& queued, std::size_t bytes) {
  TESSERA_INVARIANT(queued.staging == nullptr, queued.text, ": takes its staging in two parts");
  queued.staging = std::make_shared<StagingLease>(bytes);
  queued.call.keep_alive =
      std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
          queued.call.keep_alive, queued.staging);
  return queued.staging;
}

Pending Group::copy(void* to, const void* from, std::size_t bytes, device::Stream* stream) {
  if (stream != nullptr && backend_->stream_ordered()) {
    return options_.device != nullptr ? options_.device->start_copy(to, from, bytes, *stream)
                                      : stream->enqueue([=] { std::memcpy(to, from, bytes); });
  }
  CallCopies copies(copied_from_);
  copies.add(to, from, bytes);
  std::ignore = copies.finish();
  return {};
}

Pending Group::zero(void* to, std::size_t bytes, device::Stream* stream) {
  if (stream != nullptr && backend_->stream_ordered()) {
    return options_.device != nullptr ? options_.device->start_fill(to, 0, bytes, *stream)
                                      : stream->enqueue([=] { std::memset(to, 0, bytes); });
  }
  std::memset(to, 0, bytes);
  return {};
}

Pending Group::start_broadcast(void* data, std::int64_t numel, DType dtype, int root,
                               const CallOptions& options) {
  const std::size_t bytes = checked_bytes(numel, dtype, size(), "broadcast");
  check_pointer(data, bytes, "broadcast");
  TESSERA_CHECK(root >= 0 && root < size(), ConfigError, "broadcast: root=", root,
                " is not a rank of group '", name(), "' of ", size());
  QueuedCall queued = prepare({.shape_hash = hash_bytes(&numel, sizeof(numel), 0),
                               .total_bytes = bytes,
                               .num_tensors = 1,
                               .op = Op::kBroadcast,
                               .dtype = dtype,
                               .root = static_cast<std::uint16_t>(root)},
                              options);
  if (bytes > 0) {
    std::shared_ptr<const StagingLease> staging;
    if (is_copied()) {
      staging = add_staging(queued, broadcast_staging_bytes(bytes, call_memory()));
    }
    queued.phases.push_back({true, [=, this, call = queued.call] {
                               if (staging && root == rank()) {
                                 std::ignore = copy(staging->data(), data, bytes, call.stream);
                               }
                               return backend_->start_broadcast(staging ? staging->data() : data,
                                                                bytes, root, call);
                             }});
    if (staging && root != rank()) {
      queued.phases.push_back({false, [=, this, call = queued.call] {
                                 return copy(data, staging->data(), bytes, call.stream);
                               }});
    }
  }
  return start(std::move(queued), backend_->broadcast_sent_bytes(bytes, root));
}

Pending Group::start_all_to_all(const void* send, void* receive, std::int64_t piece_numel,
                                DType dtype, const CallOptions& options) {
  const std::size_t bytes = checked_bytes(piece_numel, dtype, size(), "all_to_all");
  check_pointer(send, bytes, "all_to_all: send");
  check_pointer(receive, bytes, "all_to_all: receive");
  QueuedCall queued = prepare({.shape_hash = hash_bytes(&piece_numel, sizeof(piece_numel), 0),
                               .total_bytes = bytes,
                               .num_tensors = 1,
                               .op = Op::kAllToAll,
                               .dtype = dtype},
                              options);
  if (bytes > 0 && !is_copied()) {
    queued.phases.push_back({true, [=, this, call = queued.call] {
                               return backend_->start_all_to_all(
                                   {send, receive, bytes, bytes, bytes}, call);
                             }});
  } else if (bytes > 0) {
    // What is received lies first in the staging, the copy of what is sent behind it.
    const auto staging =
        add_staging(queued, all_to_all_staging_bytes(bytes, size(), call_memory()));
    const std::size_t all = bytes * static_cast<std::size_t>(size());
    queued.phases = {{true,
                      [=, this, call = queued.call] {
                        std::byte* const sent = staging->data() + staging_room(all);
                        std::ignore = copy(sent, send, all, call.stream);
                        return backend_->start_all_to_all(
                            {sent, staging->data(), bytes, bytes, bytes}, call);
                      }},
                     {false, [=, this, call = queued.call] {
                        return copy(receive, staging->data(), all, call.stream);
                      }}};
  }
  return start(std::move(queued), bytes * num_peers());
}

void Group::wait_agreed() {
  if (queue_) {
    queue_->wait_agreed();
  }
}

Pending Group::start_barrier(const CallOptions& options) {
  return start(prepare({.op = Op::kBarrier}, options), 0);
}

HostGather Group::start_gather_host(std::span<const std::byte> mine, const CallOptions& options) {
  const auto all =
      std::make_shared<std::vector<std::byte>>(mine.size() * static_cast<std::size_t>(size()));
  std::byte* const own = all->data() + mine.size() * static_cast<std::size_t>(rank());
  std::copy(mine.begin(), mine.end(), own);
  const auto numel = static_cast<std::int64_t>(mine.size());
  CallOptions call = options;
  call.keep_alive = all;
  if (!backend_->stream_ordered() && !backend_->reads_peers()) {
    const Gather gather{own, all->data(), numel, DType::kUInt8};
    Pending done = start_all_gather({&gather, 1}, call);
    return {std::move(done), {all, all->data()}};
  }
  QueuedCall queued = prepare({.shape_hash = hash_bytes(&numel, sizeof(numel), 0),
                               .total_bytes = mine.size(),
                               .num_tensors = 1,
                               .op = Op::kAllGather,
                               .dtype = DType::kUInt8},
                              call);
  if (!mine.empty()) {
    queued.host = HostBytes{all->data(), mine.size(), nullptr};
  }
  return {start(std::move(queued), mine.size() * num_peers()), {all, all->data()}};
}

void Group::broadcast_host(void* data, std::size_t bytes, int root, const CallOptions& options) {
  const HostGather all = start_gather_host({static_cast<const std::byte*>(data), bytes}, options);
  all.done.wait();
  std::memcpy(data, all.bytes.get() + bytes * static_cast<std::size_t>(root), bytes);
}

std::unique_ptr<Group> Group::split_by(const Place& place, const std::string& name,
                                       const GroupOwner& owner) {
  CallOptions options;
  options.label.unit = name;
  const HostGather gathered = start_gather_host(std::as_bytes(std::span(&place, 1)), options);
  gathered.done.wait();
  std::vector<Place> places(static_cast<std::size_t>(size()));
  std::memcpy(places.data(), gathered.bytes.get(), places.size() * sizeof(Place));
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (places[static_cast<std::size_t>(r)].color == place.color) {
      members.push_back(r);
    }
  }
  std::stable_sort(members.begin(), members.end(), [&](int left, int right) {
    return places[static_cast<std::size_t>(left)].key < places[static_cast<std::size_t>(right)].key;
  });
  std::vector<int> world_ranks;
  for (const int member : members) {
    world_ranks.push_back(world_ranks_[static_cast<std::size_t>(member)]);
  }
  // The count makes the name new even if the caller's is not; it is the same on all ranks because
  // splits are collective.
  const std::string full_name =
      detail::concat(name_, "/", name, ".", ++num_splits_, ".", place.color);
  std::unique_ptr<Backend> backend =
      members.size() == 1 ? make_solo_backend(owner.device) : backend_->split(members, full_name);
  GroupOptions made = options_;
  made.device = owner.device;
  made.ledger = owner.ledger;
  made.spans = owner.spans;
  made.backend_note.clear();  // this one has chosen for itself
  return std::make_unique<Group>(std::move(backend), full_name, std::move(world_ranks),
                                 std::move(made));
}

}  // namespace tessera::comm
