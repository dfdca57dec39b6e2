// Internal to comm: what the parts of Group share (group.cpp, group_gather.cpp, group_reduce.cpp).
//
// Impl prepares a call (number, tag, staging), counts its bytes and hands it to the queue, or, for
// stream-ordered backends, enqueues its phases on the call's stream. It decides nothing about what
// the phases are.
//
// Threads: as Group.
#pragma once

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/call_copies.h"
#include "tessera/comm/call_queue.h"
#include "tessera/comm/group.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/staging_bytes.h"
#include "tessera/comm/watch.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace detail_group {

inline std::size_t checked_bytes(std::int64_t numel, DType dtype, int times, const char* what) {
  TESSERA_CHECK(numel >= 0, ConfigError, what, ": ", numel, " elements; must not be negative");
  const auto limit = std::numeric_limits<std::int64_t>::max() /
                     (static_cast<std::int64_t>(bytes_of(dtype)) * times);
  TESSERA_CHECK(numel <= limit, ConfigError, what, ": ", numel, " elements of ", to_string(dtype),
                " times ", times, " ranks do not fit the address space");
  return static_cast<std::size_t>(numel) * bytes_of(dtype);
}

inline void check_pointer(const void* data, std::size_t bytes, const char* what) {
  TESSERA_CHECK(bytes == 0 || data != nullptr, ConfigError, what, ": null memory for ", bytes,
                " bytes");
}

}  // namespace detail_group

class Group::Impl {
 public:
  Impl(std::unique_ptr<Backend> backend, std::string name, std::vector<int> world_ranks,
       GroupOptions options)
      : backend_(std::move(backend)),
        name_(std::move(name)),
        world_ranks_(std::move(world_ranks)),
        options_(std::move(options)),
        copied_from_(device_to_copy_from(*backend_, options_.device)),
        staging_(*backend_, options_.ledger, copied_from_),
        watch_(WatchOptions{name_, backend_->rank(), world_ranks_, options_.timeout, options_.beat,
                            options_.board}) {
    TESSERA_CHECK(static_cast<int>(world_ranks_.size()) == backend_->size(), ConfigError, "group '",
                  name_, "': ", world_ranks_.size(), " names for ", backend_->size(), " ranks");
    if (!backend_->stream_ordered()) {
      queue_ = std::make_unique<CallQueue>(*backend_, staging_, watch_, world_ranks_, spans());
    }
  }

  // An exception on its way through the owner of the group must not wait for calls in flight: the
  // other ranks will not come to them, and until it is caught nobody knows of it.
  ~Impl() {
    if (queue_ && std::uncaught_exceptions() > num_exceptions_) {
      queue_->abandon(detail::concat("group '", name_, "' was given up: this rank is failing"));
    } else if (queue_) {
      queue_->close();
      watch_.end();
    }
    for (const auto& held : held_) {
      try {
        held.first.wait();
      } catch (...) {  // whoever waits for the call itself is told; here only the end matters
      }
    }
  }

  // What every call starts with: its tag, and the backend's copy of the options.
  QueuedCall prepare(Op op, std::uint64_t shape_hash, std::uint64_t total_bytes,
                     std::size_t num_tensors, DType dtype, const CallOptions& options,
                     int root = 0) {
    auto words = std::make_shared<CallWords>(options.label);
    return prepare(op, shape_hash, total_bytes, num_tensors, dtype, options, root,
                   std::move(words));
  }
  QueuedCall prepare(Op op, std::uint64_t shape_hash, std::uint64_t total_bytes,
                     std::size_t num_tensors, DType dtype, const CallOptions& options, int root,
                     std::shared_ptr<const CallWords> words) {
    QueuedCall queued;
    CallTag& tag = queued.call.tag;
    tag.sequence = ++sequence_;
    tag.op = op;
    tag.dtype = dtype;
    tag.root = static_cast<std::uint16_t>(root);
    tag.num_tensors = static_cast<std::uint32_t>(num_tensors);
    tag.total_bytes = total_bytes;
    tag.shape_hash = shape_hash;
    tag.label_hash = words->hash();
    tag.content_hash = options.content_hash;
    queued.call.words = std::move(words);
    queued.text = describe(tag, options.label.unit, options.label.parameter);
    if (Spans* traced = spans()) {
      queued.span = {static_cast<std::int64_t>(total_bytes),
                     static_cast<std::int64_t>(tag.sequence), traced->intern(options.label.unit),
                     traced->intern(options.label.parameter)};
      queued.start_ns = traced->now_ns();
    }
    queued.call.keep_alive = options.keep_alive;
    queued.call.stream = options.stream;
    queued.call.met = options.met;
    if (!queue_) {
      options.ready.wait();
    } else if (options.stream != nullptr) {
      queued.ready = options.stream->record();
      if (options.ready.state() != nullptr) {
        queued.ready = Pending::all({queued.ready, options.ready});
      }
    } else {
      queued.ready = options.ready;
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
      queued.phases.push_back({true, [this, call = queued.call] {
                                 return tags_meet() ? Pending()
                                                    : backend_->start_all_gather({}, call);
                               }});
    }
    return queue_ ? queue_->start(std::move(queued)) : run_on_stream(queued);
  }

  // All the scratch of a call, for its phases: it is there when they run. Kept alive as long as the
  // call, also when that is stuck in the network.
  std::shared_ptr<const StagingLease> add_staging(QueuedCall& queued, std::size_t bytes) {
    TESSERA_INVARIANT(queued.staging == nullptr, queued.text, ": takes its staging in two parts");
    queued.staging = std::make_shared<StagingLease>(bytes);
    queued.call.keep_alive =
        std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
            queued.call.keep_alive, queued.staging);
    return queued.staging;
  }

  // True: exchanging the tags is already a meeting of all ranks.
  bool tags_meet() const { return queue_ && !backend_->compares_tags(); }

  CallMemory call_memory() const {
    return copied_from_ != nullptr ? CallMemory::kCopied : CallMemory::kReached;
  }
  bool is_copied() const { return copied_from_ != nullptr; }

  // Between the call's own memory and its staging, in the call's order. In a phase of a queued call
  // it is done when it returns.
  Pending copy(void* to, const void* from, std::size_t bytes, device::Stream* stream) {
    if (stream != nullptr && !queue_) {
      return options_.device != nullptr ? options_.device->start_copy(to, from, bytes, *stream)
                                        : stream->enqueue([=] { std::memcpy(to, from, bytes); });
    }
    CallCopies copies(copied_from_);
    copies.add(to, from, bytes);
    copies.finish();
    return {};
  }

  // Of staging.
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

  // All-gathers (group_gather.cpp); `each` is null, or gets a Pending per tensor.
  Pending start_gather(std::span<const Gather> tensors, const CallOptions& options,
                       std::vector<Pending>* each);

  // Phases of reductions (group_reduce.cpp).
  void add_sum(QueuedCall& queued, const std::function<RankParts()>& parts, void* output,
               DType output_dtype, const std::function<std::byte*()>& copy,
               const std::function<Pending()>& next);
  void add_reduce_scatter(QueuedCall& queued, const void* input, void* output,
                          std::size_t shard_numel, DType dtype, DType output_dtype);

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  std::size_t num_peers() const { return static_cast<std::size_t>(backend_->size() - 1); }

 private:
  friend class Group;

  // Whose memory the backend does not reach: a queue's network is the host's.
  static device::Device* device_to_copy_from(const Backend& backend, device::Device* device) {
    const bool is_reached = device == nullptr || !device->is_discrete();
    return is_reached || backend.stream_ordered() ? nullptr : device;
  }

  // Stream-ordered backends need no worker: each phase is enqueued behind the one before it.
  Pending run_on_stream(const QueuedCall& queued) {
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
  // function that frees memory: so it is kept here, and let go at the first call after its end.
  void hold_until_done(const Pending& pending, const std::shared_ptr<const void>& keep_alive) {
    std::erase_if(held_, [](const auto& held) { return held.first.done(); });
    if (keep_alive && !pending.done()) {
      held_.emplace_back(pending, keep_alive);
    }
  }

  const std::unique_ptr<Backend> backend_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const GroupOptions options_;
  device::Device* const copied_from_;  // null: the backend reaches the memory of calls
  Staging staging_;
  std::uint64_t num_splits_ = 0;
  std::vector<std::pair<Pending, std::shared_ptr<const void>>> held_;

  std::atomic<std::uint64_t> payload_bytes_{0};
  std::atomic<std::uint64_t> control_bytes_{0};
  std::atomic<std::uint64_t> num_calls_{0};

  const int num_exceptions_ = std::uncaught_exceptions();
  std::uint64_t sequence_ = 0;
  Watch watch_;
  std::unique_ptr<CallQueue> queue_;  // last: its worker uses everything above
};

}  // namespace tessera::comm
