// The life of a call inside a group: queued, agreed, launched, finished.
//
//   start()   caller     queues the call and sends its tag ahead, at once
//   launch    launcher   waits for the input and for the others' tags, compares them, and only if
//                        all ranks mean the same call takes its staging, which may wait for room
//                        (staging.h), and starts its first network phase
//   finish    finisher   waits for what was launched, runs local phases (the sum of a
//                        reduce-scatter, unpacking), starts later network phases, fulfils the
//                        Pending; parts of a call that have owners of their own are fulfilled as
//                        they arrive, in any order
//
// Tags travel first because a network cannot be trusted with calls that do not match: Gloo ends the
// process when it receives more than it expects. Tags of later calls travel while the data of
// earlier ones does, so a caller that runs ahead does not wait for them.
//
// Order: the backend sees tags in the order of start(), and network phases in call order: the first
// of a call only after the last of the call before it. Neither depends on time, so all ranks agree.
//
// The first failure poisons the queue: calls before it finish, the backend is aborted, and
// everything behind it fails with that error.
//
// Threads: start() from one thread at a time; launcher and finisher are its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/watchdog.h"
#include "tessera/core/spans.h"

namespace tessera::comm {

struct Phase {
  bool network = false;
  std::function<Pending()> launch;
};

// Something that a call brings and whose owners are told by themselves, as soon as it is there.
struct CallPart {
  std::function<void()> unpack;  // may be empty
  std::vector<std::shared_ptr<device::Completion>> owners;
  bool told = false;  // guarded by the queue's mutex
};

struct QueuedCall {
  Call call;         // tag, words and what to keep alive
  std::string text;  // describe(tag, unit, parameter)
  Pending ready;     // the input may be read after this
  SpanArgs span;     // how it is shown in a trace
  std::int64_t start_ns = 0;
  // Taken before the first phase; kept by what the call keeps alive. Null: it needs none.
  std::shared_ptr<StagingLease> staging;
  std::vector<Phase> phases;  // the first is a network phase
  // Both empty, or a call of one phase, which sets arrivals[i] to the arrival of parts[i].
  std::vector<CallPart> parts;
  std::shared_ptr<std::vector<Pending>> arrivals;

  // The queue's own. Until `launched`, the launcher's; then the finisher's, but for what is
  // guarded by the queue's mutex.
  std::shared_ptr<std::vector<CallTag>> tags;  // null: the backend compares them
  Pending tags_exchanged;
  std::size_t next_phase = 0;
  Pending current;                   // of the phase launched last
  bool launched = false;             // guarded
  std::size_t num_network_left = 0;  // guarded
  const std::shared_ptr<device::Completion> completion = std::make_shared<device::Completion>();
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

  // Fails every call that has not ended, and all later ones. For a rank that is failing: its peers
  // will not join these calls, so waiting for them would hide the cause.
  void abandon(const std::string& reason);

 private:
  using CallPtr = std::shared_ptr<QueuedCall>;

  void launch_calls();
  void launch(QueuedCall& call);
  void finish_calls();
  void finish(QueuedCall& call);
  void finish_parts(QueuedCall& call);
  bool leave_finish(const CallPtr& call, bool succeeded);
  void start_tags(QueuedCall& call);
  void compare_tags(const QueuedCall& call);
  std::vector<CallWords> exchange_words(const QueuedCall& call);
  void poison(const std::exception_ptr& error, const std::string& reason);

  Backend& backend_;
  Staging& staging_;
  Watchdog& watchdog_;
  const std::vector<int> world_ranks_;
  Spans* const spans_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CallPtr> to_launch_;
  std::deque<CallPtr> to_finish_;  // all that have not ended, launched or not
  bool launching_ = false;         // a call's memory is in the launcher's hands
  bool finishing_ = false;         // and in the finisher's
  bool closing_ = false;
  std::exception_ptr poison_;

  std::thread launcher_;
  std::thread finisher_;
};

}  // namespace tessera::comm
