// A stream whose work is done when it has been enqueued: it runs on the calling thread.
//
// All streams of the CPU device, and the compute stream of every device without an accelerator.
//
// Threads: any. Work of two threads never runs at the same time. A wait blocks only the thread
// that asks for it, so that another one can still bring about what it waits for.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/core/spans.h"
#include "tessera/device/device.h"

namespace tessera::device {

class InlineStream final : public Stream {
 public:
  explicit InlineStream(StreamKind kind) : kind_(kind) {}

  StreamKind kind() const override { return kind_; }
  Pending record() override;
  void wait(const Pending& pending) override;
  Pending enqueue(std::function<void()> work) override { return run(work); }
  void synchronize() override { record().wait(); }
  bool runs_on_caller() const override { return true; }
  // Null: nothing is marked. `spans` outlives the stream.
  void set_spans(Spans* spans) { spans_ = spans != nullptr && spans->enabled() ? spans : nullptr; }
  void begin_span(const char* name, const SpanArgs& args) override;
  void end_span() override;

  // enqueue() without the cost of a std::function.
  template <typename Work>
  Pending run(const Work& work) {
    const RunScope scope(*this);
    if (!error_) {
      try {
        work();
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    return outcome();
  }

 private:
  // Held while something runs or looks at the outcome. Work that calls into its own stream would
  // wait for itself: it is refused instead.
  class RunScope {
   public:
    explicit RunScope(InlineStream& stream);
    ~RunScope();
    RunScope(const RunScope&) = delete;
    RunScope& operator=(const RunScope&) = delete;

   private:
    InlineStream& stream_;
  };
  struct Begun {
    const char* name = nullptr;
    SpanArgs args;
    std::int64_t start_ns = 0;
    std::thread::id thread;
  };
  Pending outcome() const { return error_ ? Pending::failed(error_) : Pending(); }

  const StreamKind kind_;
  std::atomic<std::thread::id> runner_{};
  std::mutex mutex_;
  std::exception_ptr error_;  // guarded by mutex_
  Spans* spans_ = nullptr;
  std::mutex begun_mutex_;
  std::vector<Begun> begun_;  // guarded by begun_mutex_; each thread ends its own, the last first
};

}  // namespace tessera::device
