// The one word of asynchrony: everything that starts work returns a Pending.
//
// A Pending is a cheap, copyable handle on work that was started somewhere else: a copy on a
// stream, a collective, a read from disk. An event is a Pending, too: Stream::record() makes one.
//
//   wait()            blocks the calling thread until the work is done; throws what went wrong,
//                     on this thread, every time it is called.
//   wait_for(ns)      the same with a limit; false if it was reached first.
//   Stream::wait(p)   orders a stream behind the work without blocking the host where the device
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

// What is behind a Pending. Implemented by streams, collectives and I/O engines.
class PendingState {
 public:
  virtual ~PendingState() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;
  virtual bool wait_for(std::chrono::nanoseconds limit) = 0;
  // What Pending::all() was made of, for devices that can order a stream behind each part; empty
  // for everything else.
  virtual std::span<const Pending> parts() const { return {}; }
  // Of work that another thread hands to a device: blocks until it has, and returns what a stream
  // of that device can be ordered behind. Throws what went wrong before. Nothing for everything
  // else.
  virtual std::optional<Pending> wait_handed_over();
  // Whether wait_handed_over() would block now.
  virtual bool awaits_hand_over() { return false; }
};

class [[nodiscard]] Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<PendingState> state) : state_(std::move(state)) {}

  static Pending failed(std::exception_ptr error);
  // Done when all are. wait() waits for every part, then throws the failure of the first in the
  // list that failed; wait_for() gives all parts one common limit.
  static Pending all(std::vector<Pending> parts);

  bool done() const { return !state_ || state_->done(); }
  void wait() const {
    if (state_) {
      state_->wait();
    }
  }
  bool wait_for(std::chrono::nanoseconds limit) const { return !state_ || state_->wait_for(limit); }

  // Null when there is nothing to wait for. For devices that recognise their own states.
  const std::shared_ptr<PendingState>& state() const { return state_; }

 private:
  std::shared_ptr<PendingState> state_;
};

// For those to whom only the end matters: whoever waits for the outcome is told of a failure.
void wait_ignoring_failure(const Pending& pending) noexcept;

// A Pending that a host thread fulfils: exactly one call of succeed() or fail().
class Completion final : public PendingState {
 public:
  void succeed();
  void fail(std::exception_ptr error);
  // Runs `callback` when the work is done: at once on this thread if it already is, else on the
  // thread that fulfils it. The callback must neither throw nor block.
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
