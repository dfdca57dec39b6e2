// The result of everything that starts asynchronous work.
//
// A Pending is a cheap, copyable handle on started work: a copy on a stream, a collective, a read
// from disk. Stream::record() returns one, too, as an event.
//
//   wait()            blocks the calling thread until the work is done; throws its failure on this
//                     thread, every time it is called.
//   wait_for(ns)      the same with a time limit; false if the limit was reached first.
//   Stream::wait(p)   orders a stream after the work, without blocking the host where the device
//                     can do that (see device.h).
//   done()            true once wait() would not block, also after a failure.
//
// Invariants:
//  (1) Work that is done stays done, with the same outcome.
//  (2) Memory given to the work must stay valid until done(); dropping the Pending does not
//      cancel anything.
//  (3) A default-constructed Pending is done.
//
// Threads: every method may be called from any thread, also at the same time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace tessera::device {

class Pending;

// The state of a Pending. Implemented by streams, collectives and I/O engines.
class PendingState {
 public:
  virtual ~PendingState() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
  virtual bool wait_for(std::chrono::nanoseconds limit) = 0;
  // The parts of a Pending::all(), for devices that can order a stream after each part; empty for
  // all others.
  virtual std::span<const Pending> parts() const { return {}; }
  // For work that another thread enqueues on a device (handed_over.h): blocks until it is enqueued,
  // and returns a Pending after which a stream of that device can be ordered. Throws an earlier
  // failure. Null for all others.
  virtual std::optional<Pending> wait_handed_over();
  // True if wait_handed_over() would block now.
  virtual bool awaits_hand_over() { return false; }
};

class [[nodiscard]] Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<PendingState> state) : state_(std::move(state)) {}

  static Pending failed(std::exception_ptr error);
  // Done when all parts are. wait() waits for every part, then throws the failure of the first in
  // the list that failed; wait_for() gives all parts one common limit.
  static Pending all(std::vector<Pending> parts);

  bool done() const { return !state_ || state_->done(); }
  void wait() const {
    if (state_) {
      state_->wait();
    }
  }
  bool wait_for(std::chrono::nanoseconds limit) const { return !state_ || state_->wait_for(limit); }

  // Null if there is nothing to wait for. For devices, which recognise their own states.
  const std::shared_ptr<PendingState>& state() const { return state_; }

 private:
  std::shared_ptr<PendingState> state_;
};

// Waits for the end of the work only; its failure is thrown where the outcome is waited for.
void wait_ignoring_failure(const Pending& pending) noexcept;

// A Pending that a host thread fulfils. REQUIRES: exactly one call of succeed() or fail().
class Completion final : public PendingState {
 public:
  void succeed();
  void fail(std::exception_ptr error);
  // Runs `callback` when the work is done: at once on this thread if it is done, else on the thread
  // that fulfils it. The callback must neither throw nor block.
  void when_done(std::function<void()> callback);

  bool done() override;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;

 private:
  void finish(std::exception_ptr error);

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace tessera::device
