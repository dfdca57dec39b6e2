#include "tessera/device/pending.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"

namespace tessera::device {
namespace {

// A moment that a limit ends at. A limit too large to add to the time of day means "never", so
// that callers may pass nanoseconds::max().
class Deadline {
 public:
  explicit Deadline(std::chrono::nanoseconds limit) {
    const std::int64_t now_ns = SteadyClock().now_ns();
    const std::int64_t most_ns = std::numeric_limits<std::int64_t>::max() - now_ns;
    end_ns_ = now_ns + std::min<std::int64_t>(limit.count(), most_ns);
  }

  std::chrono::nanoseconds left() const {
    return std::chrono::nanoseconds(std::max<std::int64_t>(0, end_ns_ - SteadyClock().now_ns()));
  }
  std::chrono::steady_clock::time_point end() const {
    return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(end_ns_));
  }

 private:
  std::int64_t end_ns_ = 0;
};

class FailedState final : public PendingState {
 public:
  explicit FailedState(std::exception_ptr error) : error_(std::move(error)) {}
  bool done() override { return true; }
  void wait() override { std::rethrow_exception(error_); }
  bool wait_for(std::chrono::nanoseconds) override { std::rethrow_exception(error_); }

 private:
  const std::exception_ptr error_;
};

// Waits for every part, also after one has failed: the others may still be using memory that the
// caller is about to give back.
class AllState final : public PendingState {
 public:
  explicit AllState(std::vector<Pending> parts) : parts_(std::move(parts)) {}

  bool done() override {
    for (const Pending& part : parts_) {
      if (!part.done()) {
        return false;
      }
    }
    return true;
  }

  void wait() override {
    std::exception_ptr first;
    for (const Pending& part : parts_) {
      try {
        part.wait();
      } catch (...) {
        first = first ? first : std::current_exception();
      }
    }
    if (first) {
      std::rethrow_exception(first);
    }
  }

  bool wait_for(std::chrono::nanoseconds limit) override {
    const Deadline deadline(limit);
    std::exception_ptr first;
    for (const Pending& part : parts_) {
      try {
        if (!part.wait_for(deadline.left())) {
          return false;
        }
      } catch (...) {
        first = first ? first : std::current_exception();
      }
    }
    if (first) {
      std::rethrow_exception(first);
    }
    return true;
  }

  std::span<const Pending> parts() const override { return parts_; }

 private:
  const std::vector<Pending> parts_;
};

}  // namespace

std::optional<Pending> PendingState::wait_handed_over() { return std::nullopt; }

Pending Pending::failed(std::exception_ptr error) {
  TESSERA_INVARIANT(error != nullptr, "a failed Pending needs the error it failed with");
  return Pending(std::make_shared<FailedState>(std::move(error)));
}

Pending Pending::all(std::vector<Pending> parts) {
  std::erase_if(parts, [](const Pending& part) { return part.state() == nullptr; });
  if (parts.empty()) {
    return Pending();
  }
  if (parts.size() == 1) {
    return std::move(parts.front());
  }
  return Pending(std::make_shared<AllState>(std::move(parts)));
}

void wait_ignoring_failure(const Pending& pending) noexcept {
  try {
    pending.wait();
  } catch (...) {  // here only the end matters
  }
}

void Completion::succeed() { finish(nullptr); }

void Completion::fail(std::exception_ptr error) {
  TESSERA_INVARIANT(error != nullptr, "a failure needs its error; use succeed() for success");
  finish(std::move(error));
}

void Completion::finish(std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  {
    // Notified under the lock: a waiter may destroy this object as soon as it wakes.
    const std::lock_guard lock(mutex_);
    TESSERA_INVARIANT(!done_, "a Completion was fulfilled twice");
    done_ = true;
    error_ = std::move(error);
    callbacks.swap(callbacks_);
    finished_.notify_all();
  }
  for (const std::function<void()>& callback : callbacks) {
    callback();
  }
}

void Completion::when_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool Completion::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Completion::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done_; });
  if (error_) {
    std::rethrow_exception(error_);
  }
}

bool Completion::wait_for(std::chrono::nanoseconds limit) {
  const Deadline deadline(limit);
  std::unique_lock lock(mutex_);
  if (!finished_.wait_until(lock, deadline.end(), [this] { return done_; })) {
    return false;
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  return true;
}

}  // namespace tessera::device
