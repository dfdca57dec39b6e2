// Queues the calls of a group and runs their phases: queued, agreed, launched, finished.
//
//   start()   caller     queues the call and sends its tag ahead, at once
//   launch    launcher   waits for the input and for the other ranks' tags and compares them. Only
//                        if all are equal it takes the call's staging, which may block (staging.h),
//                        and starts the first network phase
//   finish    finisher   waits for the launched phase, runs local phases (the sum of a
//                        reduce-scatter, unpacking), starts later network phases and fulfils the
//                        Pending; parts of a call that have separate owners are fulfilled as they
//                        arrive, in any order
//
// Tags travel first because a network cannot handle calls that do not match: Gloo ends the process
// when it receives more than it expects. Tags of later calls travel while the data of earlier ones
// does, so a caller that runs ahead does not wait for them.
//
// Invariants:
//  (1) The backend gets tags in the order of start(), and network phases in call order: the first
//      of a call only after the last of the call before it. Neither depends on time, so all ranks
//      agree.
//  (2) The first failure poisons the queue: calls before it finish, the backend is aborted, and
//      all later calls fail with that error.
//
// Threads: start() from one thread at a time. The launcher, agreer and finisher threads belong to
// the queue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/watchdog.h"
#include "tessera/core/spans.h"
#include "tessera/device/handed_over.h"

namespace tessera::comm {

// [Note: calls on streams] Calls of a stream-ordered backend do not wait for tags:
//
//   start()   caller     sends the tag, orders the stream after the input and enqueues all phases.
//                        If that would block (the input is not yet handed over to the device, or an
//                        earlier call waits for that), the launcher does it, in order
//   agree     agreer     waits for the other ranks' tags and compares them, concurrently
//   finish    finisher   waits for both, frees what the call kept, fulfils the Pending
//
// So the Pending tells the host that the result is complete and that all ranks started the same
// call. A stream that is ordered after it waits for the device's work alone: results of that work
// may be written to a parameter only after wait_agreed(), which does not wait for the device.
//
// A gather of host bytes (QueuedCall::host) is not work of the stream. Its owner is told as soon as
// the bytes have arrived, out of call order: the device may still work on earlier calls.

// The Pending of a call that is work of a stream. The thread that enqueues the phases hands over
// `on_stream`.
class StreamCall : public device::PendingState {
 public:
  explicit StreamCall(std::shared_ptr<device::Completion> ended) : ended_(std::move(ended)) {}

  device::HandedOver& on_stream() { return on_stream_; }
  // Blocks until the call is enqueued, or its enqueueing has failed; throws that failure.
  void wait_enqueued();

  bool done() override { return ended_->done(); }
  void wait() override { ended_->wait(); }
  bool wait_for(std::chrono::nanoseconds limit) override { return ended_->wait_for(limit); }
  bool awaits_hand_over() override { return on_stream_.awaits_hand_over(); }
  std::optional<Pending> wait_handed_over() override {
    if (ended_->done()) {
      ended_->wait();  // throws a failure that the stream does not know
    }
    return on_stream_.wait_handed_over();
  }

 protected:
  const std::shared_ptr<device::Completion> ended_;

 private:
  device::HandedOver on_stream_;
};

// The same for a gather of host bytes: done when they have arrived. Its failure is that of the
// group, once the queue has reached the call.
class HostCall final : public StreamCall {
 public:
  using StreamCall::StreamCall;

  bool done() override;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
};

// Host bytes that ranks exchange independently of other calls (Backend::start_host_gather).
struct HostBytes {
  std::byte* all = nullptr;
  std::size_t piece_bytes = 0;
  // On streams where the queue exchanges tags: fulfilled by the thread that compares them, in
  // order.
  std::shared_ptr<device::Completion> arrived;
};

struct Phase {
  bool network = false;
  std::function<Pending()> launch;
};

// A part of a call's result whose owners are told separately, as soon as it has arrived.
struct CallPart {
  std::function<void()> unpack;  // may be empty
  std::vector<std::shared_ptr<device::Completion>> owners;
  bool told = false;  // guarded by the queue's mutex
};

struct QueuedCall {
  Call call;         // tag, words and keep_alive
  std::string text;  // describe(tag, unit, parameter)
  Pending ready;     // the input may be read after this
  SpanArgs span;     // how it is shown in a trace
  std::int64_t start_ns = 0;
  // Taken before the first phase; kept by the call's keep_alive. Null: no staging.
  std::shared_ptr<StagingLease> staging;
  std::vector<Phase> phases;  // the first is a network phase
  // Both empty, or the call has one phase, which sets arrivals[i] to the arrival of parts[i].
  std::vector<CallPart> parts;
  std::shared_ptr<std::vector<Pending>> arrivals;
  std::optional<HostBytes> host;  // set for a gather of host bytes, which has no phases

  // Private to the queue. Used by the launcher until `launched`, then by the finisher, except for
  // fields guarded by the queue's mutex.
  std::shared_ptr<std::vector<CallTag>> tags;  // null: the backend compares them
  Pending tags_exchanged;
  std::size_t next_phase = 0;
  Pending current;                   // the phase launched last
  bool launched = false;             // guarded
  std::size_t num_network_left = 0;  // guarded
  const std::shared_ptr<device::Completion> completion = std::make_shared<device::Completion>();
  // Calls on streams; null elsewhere.
  std::shared_ptr<StreamCall> on_stream;
  Pending enqueued;                 // the work enqueued, even if the launch failed
  bool launch_failed = false;       // guarded
  bool agreed = false;              // guarded: tags were compared, ...
  std::exception_ptr disagreement;  // ... with this result; null: all are equal
};

class CallQueue {
 public:
  // `spans` may be null.
  CallQueue(Backend& backend, Staging& staging, Watchdog& watchdog, std::vector<int> world_ranks,
            Spans* spans);
  ~CallQueue();
  // Waits until every call has ended; none may be started afterwards.
  void close();

  Pending start(QueuedCall call);

  // Group::wait_agreed().
  void wait_agreed();

  // Fails every call that has not ended, and all later ones. For a failing rank: its peers will not
  // join these calls, so waiting for them would hide the cause.
  void abandon(const std::string& reason);

 private:
  using CallPtr = std::shared_ptr<QueuedCall>;

  static Pending pending_of(const QueuedCall& call);
  void add_host_phase(QueuedCall& call);
  void gather_host(QueuedCall& call);
  void launch_calls();
  void launch(QueuedCall& call);
  void launch_on_stream(QueuedCall& call);
  void agree_on_calls();
  void agree(QueuedCall& call);
  void finish_calls();
  // REQUIRES: mutex_ is held.
  bool is_to_finish(const QueuedCall& call) const {
    return on_streams_ ? (call.agreed && (call.launched || call.disagreement)) || call.launch_failed
                       : call.launched;
  }
  void finish(QueuedCall& call);
  void finish_parts(QueuedCall& call);
  bool leave_finish(const CallPtr& call, bool succeeded);
  void start_tags(QueuedCall& call);
  void compare_tags(const QueuedCall& call);
  std::vector<CallWords> exchange_words(const QueuedCall& call);
  static void leave_stream(const QueuedCall& call, std::chrono::steady_clock::time_point limit);
  void poison(const std::exception_ptr& error, const std::string& reason);

  Backend& backend_;
  Staging& staging_;
  Watchdog& watchdog_;
  const std::vector<int> world_ranks_;
  Spans* const spans_;
  const bool on_streams_;  // see [Note: calls on streams]

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CallPtr> to_launch_;
  std::deque<CallPtr> to_agree_;    // on streams
  std::deque<CallPtr> to_finish_;   // all that have not ended, launched or not
  std::size_t num_unlaunched_ = 0;  // on streams; a call whose launch failed stays among them
  bool starting_ = false;           // a call's memory is used by the caller,
  bool launching_ = false;          // by the launcher,
  bool finishing_ = false;          // by the finisher
  bool closing_ = false;
  std::exception_ptr poison_;

  std::thread launcher_;
  std::thread agreer_;  // on streams
  std::thread finisher_;
};

}  // namespace tessera::comm
