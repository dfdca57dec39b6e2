// The life of a call inside a group: queued, launched, checked, finished.
//
// A call is a list of phases. Network phases start something on the backend; local phases compute or
// copy (the sum of a reduce-scatter, the unpacking of a packed all-gather). Launching is in call
// order: the first network phase of a call starts only after the last network phase of the call
// before it. So the order in which the backend sees calls follows from the order of start() alone,
// never from time, and is the same on every rank. As long as a call has one network phase (all but
// a large all-reduce) and its input is ready, start() launches it at once, so many are in flight.
//
// The worker finishes calls in order: it waits (watch.h), compares tags, runs local phases and
// fulfils the Pending. The first failure poisons the queue: the backend is told to give up, and
// everything queued or started later fails with that error.
//
// Threads: start() from one thread at a time; one worker thread of its own.
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
#include "tessera/comm/watch.h"

namespace tessera::comm {

struct Phase {
  bool network = false;
  std::function<Pending()> launch;
};

struct QueuedCall {
  Call call;         // tag and what to keep alive
  std::string text;  // describe(tag, unit, parameter)
  Pending ready;     // the input may be read after this
  std::vector<Phase> phases;  // at least one

  // The queue's own.
  std::size_t num_launched = 0;
  std::size_t num_network_left = 0;
  Pending current;  // of the phase launched last
  std::shared_ptr<std::vector<CallTag>> tags;
  Pending tags_exchanged;
  std::shared_ptr<device::Completion> completion = std::make_shared<device::Completion>();
};

class CallQueue {
 public:
  CallQueue(Backend& backend, Watch& watch, std::vector<int> world_ranks);
  // Waits until every call has come to an end.
  ~CallQueue();

  Pending start(QueuedCall call);

 private:
  void work();
  void finish(QueuedCall& call);
  void start_tags(QueuedCall& call);
  void launch_next_phase(QueuedCall& call);
  void launch_followers();
  void compare_tags(const QueuedCall& call) const;
  void poison(std::exception_ptr error, const std::string& reason);

  Backend& backend_;
  Watch& watch_;
  const std::vector<int> world_ranks_;

  // Guarded by mutex_, which is also what makes launches follow one another.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<QueuedCall>> calls_;  // the front is the one being finished
  bool closing_ = false;
  std::exception_ptr poison_;

  std::thread worker_;
};

}  // namespace tessera::comm
