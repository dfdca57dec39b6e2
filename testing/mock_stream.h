// One stream of the mock device: a queue and the thread that works it off, late.
//
// [Note: how early a copy may begin]
// Once a copy has begun, its destination may hold anything, so poison is legal there from the
// first moment at which the copy could run. That is not yet the case when it is enqueued: work
// ahead of it may still need the old bytes. A copy is begun when everything ahead of it in the
// queue is copies and fills that do not touch its destination. Work of unknown reach (host
// functions, waits) ahead of it holds it back.
//
// Threads: any thread enqueues and waits; one worker thread runs. Pendings share the queue and may
// outlive the stream; the stream's destructor runs everything first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "tessera/device/device.h"
#include "testing/mock_device.h"

namespace tessera::device {

// A copy, a fill (`from` is null) or something of unknown reach (`work`).
struct LateOp {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  std::uint8_t value = 0;
  std::function<void()> work;
  bool is_of_unknown_reach = false;
  bool has_begun = false;

  static LateOp of(std::function<void()> work);
  void run() const;
};

class LateQueue {
 public:
  LateQueue(LateMode mode, std::uint64_t seed, std::uint32_t max_delay_yields)
      : is_lazy_(mode == LateMode::kLazy), max_delay_yields_(max_delay_yields), random_(seed) {}

  // Operations are numbered from 1 in the order they were enqueued.
  std::uint64_t enqueue(LateOp op);
  std::uint64_t num_enqueued();
  bool is_completed(std::uint64_t number);
  // Lets the worker go on up to there.
  void demand(std::uint64_t number);
  // Demands, then blocks until `deadline` (or for ever); false if that came first. Throws the
  // failure of the operation or of one before it.
  bool wait(std::uint64_t number,
            std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

  // The worker's loop; returns when everything has run after stop().
  void work_off();
  void stop();

 private:
  void begin_what_may_begin();
  void delay();

  const bool is_lazy_;
  const std::uint32_t max_delay_yields_;
  std::uint64_t random_;  // the worker's

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_. The front stays in place while it runs; its `work` is the worker's then.
  std::deque<LateOp> ops_;
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_completed_ = 0;
  std::uint64_t demanded_ = 0;
  std::uint64_t failed_at_ = std::numeric_limits<std::uint64_t>::max();
  std::exception_ptr error_;
  bool is_stopping_ = false;
};

class MockStream final : public Stream {
 public:
  MockStream(StreamKind kind, const MockDeviceOptions& options);
  ~MockStream() override;

  StreamKind kind() const override { return kind_; }
  Pending record() override;
  void wait(const Pending& pending) override;
  bool can_order_behind(const Pending& pending) const override;
  Pending enqueue(std::function<void()> work) override;
  void synchronize() override { record().wait(); }

  Pending enqueue(LateOp op);

 private:
  const StreamKind kind_;
  const std::shared_ptr<LateQueue> queue_;
  std::thread worker_;
};

}  // namespace tessera::device
