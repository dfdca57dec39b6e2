// The interface to the accelerator: streams, asynchronous copies and memory. CPU and CUDA are
// behind it, and no other module knows which.
//
// Streams are in-order queues. Work on different streams is ordered only by record() and wait():
//
//   Pending written = device.start_copy(dst, src, bytes, device.stream(StreamKind::kRead));
//   device.stream(StreamKind::kCompute).wait(written);   // ordered, the host goes on
//
// The compute stream is where the model's operators run: on CPU that is the calling thread itself
// (waiting on it blocks), on CUDA the stream that LibTorch uses.
//
// A failure inside a stream is kept, for good: the Pending of the work that failed throws it, and
// so does everything recorded on that stream afterwards, and synchronize(). Work behind a failure
// need not run. Nothing that enqueues work throws because earlier work failed.
//
// Threads: a Device and its streams may be used from any thread; work enqueued on one stream from
// several threads at the same time runs in some order. Destroying a Device waits for its streams;
// memory must be given back before its Device is destroyed.
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

// kComm is for copies that a group makes for its calls, where the network cannot reach the device's
// memory, and for those of a save; it is never made to wait for anything, so that these end by
// themselves.
enum class StreamKind : std::uint8_t { kCompute, kGather, kRead, kWrite, kReduce, kComm };
inline constexpr std::size_t kNumStreams = 6;
std::string_view to_string(StreamKind kind);

class Stream {
 public:
  virtual ~Stream() = default;
  virtual StreamKind kind() const = 0;
  // Done when everything enqueued so far is.
  virtual Pending record() = 0;
  // Everything enqueued from now on starts after `pending` is done. If `pending` failed, this
  // stream fails with the same error. The host goes on if the device can order the stream by
  // itself; it blocks on the streams of a CPU, and on others until work that another thread hands
  // over (handed_over.h) has been, which may be work of this very stream.
  virtual void wait(const Pending& pending) = 0;
  // Whether wait(pending) would let the host go on now.
  virtual bool can_order_behind(const Pending& pending) const { return pending.done(); }
  // Runs `work` on the host in stream order, on some thread. `work` must not call into this
  // device, nor destroy anything that does: CUDA's runtime forbids it.
  virtual Pending enqueue(std::function<void()> work) = 0;
  // Blocks until the stream is empty; throws the first failure.
  virtual void synchronize() = 0;
  // Its work runs on the thread that asks for it: so a wait on it is a wait of that thread, which
  // had better throw what went wrong there and then.
  virtual bool runs_on_caller() const { return false; }
  // The stream in the words of its runtime (cudaStream_t), or null.
  virtual void* native_handle() const { return nullptr; }

  // What is enqueued between the two is one span in the trace, by the device's own times; for work
  // that is not enqueued through this class, such as the model's operators. They nest, and cost
  // nothing unless the device was made with spans that are on. `name` is a literal. Where work runs
  // on the calling thread, so does its span; both ends are then on one thread.
  virtual void begin_span(const char* /*name*/, const SpanArgs& /*args*/ = {}) {}
  // REQUIRES: a span was begun and not ended.
  virtual void end_span() {}
};

// A span of the device's own time, from here to the end of the scope.
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

// Bytes that are given back on destruction. Moves, never copies; not zeroed.
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
  // The same in all processes of a host that share this memory; 0: nobody else has it.
  std::uint64_t shared_id = 0;
};

// What page-locking has cost since the device was made, in time and in bytes, whether they are
// still held or not.
struct PinStats {
  double seconds = 0;
  std::size_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // for people: "cpu", "cuda:0 (NVIDIA H200)"
  virtual Stream& stream(StreamKind kind) = 0;
  // Is Tier::kDevice other memory than the host's? Then the host must not touch it: bytes go
  // there and come back only by copies, and what stays in host memory costs the device nothing.
  virtual bool is_discrete() const { return false; }

  // Aligned to `alignment` (a power of two, at least 16); zero bytes give a null pointer. Charged
  // to the ledger, as long as it lives, under `role`. Throws DeviceError with the number asked
  // for, the number free and the remedy; where there is a ledger, with memory_report() of it.
  virtual Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment = 256) = 0;

  // Between any two places that the device or the host can address. Ranges must not overlap, and
  // must stay valid until the Pending is done. REQUIRES: `stream` belongs to this device.
  virtual Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) = 0;
  virtual Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) = 0;

  // Of Tier::kDevice.
  virtual MemoryInfo memory_info() const = 0;
  // Zeros where nothing has to be made known to a device.
  virtual PinStats pin_stats() const { return {}; }

  // Puts the times of all work that is done into the spans that the device was made with; it does
  // not wait for the rest. Call it before a trace is written.
  virtual void collect_spans() {}
};

}  // namespace tessera::device
