#include "testing/mock_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_copy.h"

namespace tessera::device {
namespace {

// Polling is no wait, so it moves nothing; but a program that polls to the end must not hang.
constexpr std::uint32_t kPollsBeforeDemand = 1000;
// How far back in the queue a copy may still be begun; bounds what an enqueue costs.
constexpr std::size_t kMostAhead = 32;

class LatePending final : public PendingState {
 public:
  LatePending(std::shared_ptr<LateQueue> queue, std::uint64_t number)
      : queue_(std::move(queue)), number_(number) {}

  bool done() override {
    if (queue_->is_completed(number_)) {
      return true;
    }
    if (num_polls_.fetch_add(1, std::memory_order_relaxed) >= kPollsBeforeDemand) {
      queue_->demand(number_);
    }
    return false;
  }
  void wait() override { queue_->wait(number_); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto now = std::chrono::steady_clock::now();
    const auto most = std::chrono::steady_clock::time_point::max() - now;
    return limit >= most ? queue_->wait(number_) : queue_->wait(number_, now + limit);
  }

 private:
  const std::shared_ptr<LateQueue> queue_;
  const std::uint64_t number_;
  std::atomic<std::uint32_t> num_polls_{0};
};

std::uint64_t next_random(std::uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15U;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

}  // namespace

LateOp LateOp::of(std::function<void()> work) {
  LateOp op;
  op.work = std::move(work);
  op.is_of_unknown_reach = true;
  return op;
}

void LateOp::run() const {
  if (work) {
    work();
  } else if (from != nullptr) {
    copy_bytes(to, from, bytes);
  } else {
    fill_bytes(to, value, bytes);
  }
}

std::uint64_t LateQueue::enqueue(LateOp op) {
  const std::lock_guard lock(mutex_);
  ops_.push_back(std::move(op));
  ++num_enqueued_;
  begin_what_may_begin();
  changed_.notify_all();
  return num_enqueued_;
}

std::uint64_t LateQueue::num_enqueued() {
  const std::lock_guard lock(mutex_);
  return num_enqueued_;
}

bool LateQueue::is_completed(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return num_completed_ >= number;
}

void LateQueue::demand(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number > demanded_) {
    demanded_ = number;
    changed_.notify_all();
  }
}

bool LateQueue::wait(std::uint64_t number,
                     std::optional<std::chrono::steady_clock::time_point> deadline) {
  demand(number);
  std::unique_lock lock(mutex_);
  const auto is_done = [&] { return num_completed_ >= number; };
  if (!deadline) {
    changed_.wait(lock, is_done);
  } else if (!changed_.wait_until(lock, *deadline, is_done)) {
    return false;
  }
  if (failed_at_ <= number) {
    std::rethrow_exception(error_);
  }
  return true;
}

// See [Note: how early a copy may begin]. REQUIRES: mutex_ is held.
void LateQueue::begin_what_may_begin() {
  if (error_) {
    return;
  }
  const std::size_t num_looked_at = std::min(ops_.size(), kMostAhead);
  for (std::size_t i = 0; i < num_looked_at && !ops_[i].is_of_unknown_reach; ++i) {
    LateOp& op = ops_[i];
    const bool is_free =
        !op.has_begun &&
        std::all_of(ops_.begin(), ops_.begin() + static_cast<std::ptrdiff_t>(i),
                    [&op](const LateOp& ahead) {
                      return !ranges_overlap(op.to, op.bytes, ahead.to, ahead.bytes) &&
                             !ranges_overlap(op.to, op.bytes, ahead.from,
                                             ahead.from ? ahead.bytes : 0);
                    });
    if (is_free) {
      fill_bytes(op.to, kPoisonByte, op.bytes);
      op.has_begun = true;
    }
  }
}

void LateQueue::delay() {
  if (is_lazy_ || max_delay_yields_ == 0) {
    return;
  }
  const std::uint64_t drawn = next_random(random_);
  for (std::uint64_t i = drawn % (max_delay_yields_ + 1ULL); i > 0; --i) {
    std::this_thread::yield();
  }
}

void LateQueue::work_off() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      const bool may_go_on = !is_lazy_ || is_stopping_ || demanded_ > num_completed_;
      return ops_.empty() ? is_stopping_ : may_go_on;
    });
    if (ops_.empty()) {
      return;
    }
    LateOp& op = ops_.front();
    std::exception_ptr error = error_;
    lock.unlock();
    if (!error) {
      delay();
      try {
        op.run();
      } catch (...) {
        error = std::current_exception();
      }
    }
    op.work = nullptr;  // what it holds is gone before anybody hears that it is done
    lock.lock();
    ops_.pop_front();
    ++num_completed_;
    if (error && !error_) {
      error_ = error;
      failed_at_ = num_completed_;
    }
    begin_what_may_begin();
    changed_.notify_all();
  }
}

void LateQueue::stop() {
  const std::lock_guard lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
}

MockStream::MockStream(StreamKind kind, const MockDeviceOptions& options)
    : kind_(kind),
      queue_(std::make_shared<LateQueue>(options.mode,
                                         options.seed * kNumStreams + static_cast<unsigned>(kind),
                                         options.max_delay_yields)),
      worker_([queue = queue_] { queue->work_off(); }) {}

MockStream::~MockStream() {
  queue_->stop();
  worker_.join();
}

Pending MockStream::record() {
  const std::uint64_t number = queue_->num_enqueued();
  return number == 0 ? Pending() : Pending(std::make_shared<LatePending>(queue_, number));
}

bool MockStream::can_order_behind(const Pending& pending) const {
  const std::shared_ptr<PendingState>& state = pending.state();
  if (state == nullptr) {
    return true;
  }
  const std::span<const Pending> parts = state->parts();
  return !state->awaits_hand_over() &&
         std::all_of(parts.begin(), parts.end(),
                     [this](const Pending& part) { return can_order_behind(part); });
}

// As on CUDA, the host waits for what is handed over: it may be work of this very stream.
void MockStream::wait(const Pending& pending) {
  if (pending.state() != nullptr && !pending.state()->parts().empty()) {
    for (const Pending& part : pending.state()->parts()) {
      wait(part);
    }
    return;
  }
  try {
    if (const auto handed_over =
            pending.state() != nullptr ? pending.state()->wait_handed_over() : std::nullopt) {
      return wait(*handed_over);
    }
  } catch (...) {
    queue_->enqueue(
        LateOp::of([error = std::current_exception()] { std::rethrow_exception(error); }));
    return;
  }
  if (pending.done()) {
    try {
      pending.wait();
      return;
    } catch (...) {  // the stream must fail in its order, below
    }
  }
  queue_->enqueue(LateOp::of([pending] { pending.wait(); }));
}

Pending MockStream::enqueue(std::function<void()> work) {
  TESSERA_INVARIANT(work != nullptr, "enqueue of no work on the ", to_string(kind_), " stream");
  return enqueue(LateOp::of(std::move(work)));
}

Pending MockStream::enqueue(LateOp op) {
  return Pending(std::make_shared<LatePending>(queue_, queue_->enqueue(std::move(op))));
}

}  // namespace tessera::device
