// A CUDA stream with its events and its memory of failures.
//
// [Note: failures on CUDA streams]
// Host functions run on a thread of the driver and cannot throw; a stream that waits for an event
// learns from CUDA nothing about the failure of what was recorded there. So every operation has a
// number; a stream keeps the first number that failed, and, with its own number, each event that it
// waits for. Once an operation is done, everything it waited for is done as well, and its outcome
// can be looked up without asking CUDA: in the stream's own books, then in those of the streams
// that it waited for, oldest first. What was looked up and succeeded is struck off.
//
// Threads: any. One mutex per device guards the books of all its streams, because looking up goes
// from stream to stream. No CUDA call is made under it: host functions take it, too.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "tessera/device/cuda_event_pool.h"
#include "tessera/device/cuda_times.h"
#include "tessera/device/device.h"
#include "tessera/device/span_track.h"

namespace tessera::device {

class CudaBooks;

// An operation of a stream that has an event behind it.
class CudaPending final : public PendingState {
 public:
  CudaPending(std::shared_ptr<CudaEventPool> pool, cudaEvent_t event,
              std::shared_ptr<CudaBooks> books, std::size_t stream, std::uint64_t number);
  ~CudaPending() override;

  bool done() override;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;

  cudaEvent_t event() const { return event_; }
  const CudaBooks* books() const { return books_.get(); }
  std::size_t stream() const { return stream_; }
  std::uint64_t number() const { return number_; }

 private:
  void throw_if_failed();

  const std::shared_ptr<CudaEventPool> pool_;
  const cudaEvent_t event_;
  const std::shared_ptr<CudaBooks> books_;
  const std::size_t stream_;
  const std::uint64_t number_;
};

// The failures of all streams of one device; see [Note: failures on CUDA streams].
class CudaBooks {
 public:
  void fail(std::size_t stream, std::uint64_t number, std::exception_ptr error);
  void depend(std::size_t stream, std::uint64_t number, std::shared_ptr<CudaPending> on);
  // Null for success. REQUIRES: the operation is done.
  std::exception_ptr failure(std::size_t stream, std::uint64_t number);
  // The oldest dependency that is not struck off, or null.
  std::shared_ptr<CudaPending> oldest_dependency(std::size_t stream, std::uint64_t* number);
  // For a stream beside those of the device's kinds.
  std::size_t add_page();
  // Ends the cycles of ownership between streams that waited for one another.
  void clear_dependencies();

 private:
  struct Dependency {
    std::uint64_t number = 0;
    std::shared_ptr<CudaPending> on;
  };
  struct Page {
    std::uint64_t failed_at = std::numeric_limits<std::uint64_t>::max();
    std::exception_ptr error;
    std::deque<Dependency> dependencies;
  };
  std::exception_ptr failure_locked(std::size_t stream, std::uint64_t number);

  std::mutex mutex_;
  std::deque<Page> pages_ = std::deque<Page>(kNumStreams);  // guarded by mutex_
};

struct CudaStreamOptions {
  StreamKind kind = StreamKind::kCompute;
  std::optional<std::size_t> page;  // in the books; none: that of its kind
  int device_index = 0;
  cudaStream_t handle = nullptr;
  bool is_owned = false;
  std::shared_ptr<CudaEventPool> pool;
  std::shared_ptr<CudaBooks> books;
  // Both null: nothing is timed. `spans` outlives the stream.
  Spans* spans = nullptr;
  std::shared_ptr<CudaTimes> times;
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(CudaStreamOptions options);
  // Waits for the stream.
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  StreamKind kind() const override { return options_.kind; }
  Pending record() override;
  void wait(const Pending& pending) override;
  bool can_order_behind(const Pending& pending) const override;
  Pending enqueue(std::function<void()> work) override {
    return enqueue(std::move(work), "host function");
  }
  void synchronize() override;
  void* native_handle() const override { return options_.handle; }
  void begin_span(const char* name, const SpanArgs& args) override;
  void end_span() override;

  // Numbers an operation, starts it with `start(handle)` and records an event behind it. What
  // `start` throws fails the stream. Where work is timed, it is a span called `label`: a literal,
  // or null for none.
  Pending launch(const std::function<void(cudaStream_t)>& start, const char* label = "kernel",
                 const SpanArgs& args = {});
  Pending enqueue(std::function<void()> work, const char* label, const SpanArgs& args = {});
  // See Device::collect_spans().
  void collect_spans();

  // For work on `handle` that the streams of this one's device are to be ordered behind: a page of
  // its own in the same books. `handle` belongs to the same GPU, and outlives what is made here.
  std::unique_ptr<CudaStream> make_sibling(cudaStream_t handle) const;
  // Work that was given out as done in the end, and is found out to be wrong: `first`, which this
  // stream recorded, has failed, and all behind it.
  void fail(const Pending& first, std::exception_ptr error);
  // Two streams with the same: one device's.
  const CudaBooks* books() const { return options_.books.get(); }

 private:
  struct HostWork;
  static void CUDART_CB run_host_work(void* given);
  Pending launch_locked(const std::function<void(cudaStream_t)>& start, const char* label,
                        const SpanArgs& args);
  // REQUIRES: mutex_ is held and the device is current. What goes wrong ends the timing of this
  // stream and nothing else: the work itself meets the same error.
  void mark_begin(const char* label, const SpanArgs& args) noexcept;
  void mark_end() noexcept;
  void resolve_some() noexcept;
  template <typename Work>
  void timing(const Work& work) noexcept;
  void strike_off_done();
  std::size_t page() const {
    return options_.page.value_or(static_cast<std::size_t>(options_.kind));
  }

  const CudaStreamOptions options_;
  std::mutex mutex_;                // operations reach CUDA in the order of their numbers
  std::uint64_t number_ = 0;        // of the last operation; guarded by mutex_
  std::optional<SpanTrack> track_;  // guarded by mutex_; none: nothing is timed
};

}  // namespace tessera::device
