// The interface to the accelerator: streams, asynchronous copies and memory. CPU and CUDA implement
// it; no other module depends on which one is used.
//
// Streams are in-order queues. Work on different streams is ordered only by record() and wait():
//
//   Pending written = device.start_copy(dst, src, bytes, device.stream(StreamKind::kRead));
//   device.stream(StreamKind::kCompute).wait(written);   // ordered, the host goes on
//
// The model's operators run on the compute stream: on CPU that is the calling thread itself
// (waiting on it blocks), on CUDA the stream that LibTorch uses.
//
// A failure inside a stream is permanent: the Pending of the failed work throws it, and so do every
// Pending recorded on that stream afterwards and synchronize(). Work enqueued after a failure need
// not run. Enqueuing does not throw because earlier work failed.
//
// Threads: a Device and its streams may be used from any thread; work enqueued on one stream from
// several threads at the same time runs in some order. Destroying a Device waits for its streams;
// its memory must be freed before it is destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/core/ledger.h"
#include "tessera/core/spans.h"
#include "tessera/device/pending.h"

namespace tessera::device {

// kComm carries staging copies of collectives, where the network cannot reach device memory, and
// copies of saves. Nothing may order it after other work, so its copies always complete.
enum class StreamKind : std::uint8_t { kCompute, kGather, kRead, kWrite, kReduce, kComm };
inline constexpr std::size_t kNumStreams = 6;
std::string_view to_string(StreamKind kind);

class Stream {
 public:
  virtual ~Stream() = default;
  virtual StreamKind kind() const = 0;
  // Done when everything enqueued so far is done.
  virtual Pending record() = 0;
  // Everything enqueued from now on starts after `pending` is done. If `pending` failed, this
  // stream fails with the same error. The host does not block if the device can order the stream
  // itself. It does block on the streams of a CPU, and elsewhere until work that another thread
  // hands over (handed_over.h) has been enqueued, which may be work of this very stream.
  virtual void wait(const Pending& pending) = 0;
  // True if wait(pending) would not block the host now.
  virtual bool can_order_behind(const Pending& pending) const { return pending.done(); }
  // Runs `work` on the host in stream order, on some thread. `work` must not call into this device,
  // nor destroy objects that do: CUDA's runtime forbids it.
  virtual Pending enqueue(std::function<void()> work) = 0;
  // Blocks until the stream is empty; throws the first failure.
  virtual void synchronize() = 0;
  // True: work runs inline on the calling thread. A wait on the stream blocks that thread, so
  // failures are thrown there.
  virtual bool runs_on_caller() const { return false; }
  // The native stream (cudaStream_t), or null.
  virtual void* native_handle() const { return nullptr; }

  // Work enqueued between begin_span() and end_span() is one span in the trace, with device times;
  // for work that is not enqueued through this class, such as the model's operators. Spans nest,
  // and cost nothing unless the device was made with enabled spans. `name` is a literal. Where work
  // runs on the calling thread, both ends of a span must be on one thread.
  virtual void begin_span(const char* /*name*/, const SpanArgs& /*args*/ = {}) {}
  // REQUIRES: a span was begun and not ended.
  virtual void end_span() {}
};

// A span in device time, from construction to the end of the scope.
class StreamSpan {
 public:
  StreamSpan(Stream& stream, const char* name, const SpanArgs& args = {}) : stream_(stream) {
    stream_.begin_span(name, args);
  }
  ~StreamSpan() { stream_.end_span(); }
  StreamSpan(const StreamSpan&) = delete;
  StreamSpan& operator=(const StreamSpan&) = delete;

 private:
  Stream& stream_;
};

// Owned bytes, freed on destruction. Movable, not copyable; not zeroed.
class Memory {
 public:
  Memory() = default;
  Memory(void* data, std::size_t bytes, std::function<void()> give_back)
      : data_(data), bytes_(bytes), give_back_(std::move(give_back)) {}
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { reset(); }

  void reset() noexcept;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::function<void()> give_back_;
};

struct MemoryInfo {
  std::size_t total_bytes = 0;
  std::size_t free_bytes = 0;
  // Equal in all processes of a host that share this memory; 0: not shared.
  std::uint64_t shared_id = 0;
};

// Cost of page-locking since the device was made: time, and bytes, whether still held or not.
struct PinStats {
  double seconds = 0;
  std::size_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // for display: "cpu", "cuda:0 (NVIDIA H200)"
  virtual Stream& stream(StreamKind kind) = 0;
  // True if Tier::kDevice is not host memory. Then the host must not access it: bytes move only by
  // copies, and what stays in host memory costs the device nothing.
  virtual bool is_discrete() const { return false; }

  // Aligned to `alignment` (a power of two, at least 16); zero bytes give a null pointer. Charged
  // to the ledger under `role` until it is freed. Throws DeviceError with the bytes requested, the
  // bytes free and the remedy, and with memory_report() if there is a ledger.
  virtual Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment = 256) = 0;

  // Copies between any two addresses that the device or the host can access. Ranges must not
  // overlap, and must stay valid until the Pending is done. REQUIRES: `stream` belongs to this
  // device.
  virtual Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) = 0;
  virtual Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) = 0;

  // Total and free memory of Tier::kDevice.
  virtual MemoryInfo memory_info() const = 0;
  // Zeros where memory is not page-locked.
  virtual PinStats pin_stats() const { return {}; }

  // Writes the times of all finished work to the device's spans; does not wait for unfinished work.
  // Call it before a trace is written.
  virtual void collect_spans() {}
};

}  // namespace tessera::device
