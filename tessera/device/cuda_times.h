// The times of CUDA events on the clock of the host's spans.
//
// CUDA tells only the time between two events. So one event, the anchor, is recorded on an idle
// stream of our own while the host watches: it was reached between two readings of the host's
// clock, and every other event lies so many milliseconds after it, or before. The two clocks drift
// apart, and the number is a float, which is coarse when it is large: the anchor is taken anew
// every second.
//
// A new anchor must not hold up the step. If the GPU does not reach it at once (streams share its
// queues), the old one serves on and a new one is tried later.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include <cuda_runtime_api.h>

#include "tessera/core/spans.h"
#include "tessera/device/cuda_event_pool.h"
#include "tessera/device/span_track.h"

namespace tessera::device {

class CudaTimes final : public MarkTimes {
 public:
  // Waits for the first anchor. `spans` outlives this object. REQUIRES: the device is current.
  CudaTimes(const Spans& spans, int device_index);
  ~CudaTimes() override;
  CudaTimes(const CudaTimes&) = delete;
  CudaTimes& operator=(const CudaTimes&) = delete;

  cudaEvent_t take() { return pool_.take(); }
  void give_back(void* event) noexcept override;
  std::optional<std::int64_t> time_ns(void* event) override;

 private:
  struct Anchor {
    cudaEvent_t event = nullptr;
    std::int64_t at_ns = 0;
    std::int64_t error_ns = 0;  // at most so far before or after
  };
  // Nothing if the GPU did not reach it within `limit_ns`.
  std::optional<Anchor> try_anchor(std::int64_t limit_ns);
  void renew_anchor_if_due();

  struct StreamEnd {
    void operator()(cudaStream_t stream) const {
      cudaStreamDestroy(stream);  // fails only when the driver has shut down
    }
  };

  const Spans& spans_;
  CudaEventPool pool_;
  std::unique_ptr<CUstream_st, StreamEnd> stream_;

  // Guarded by mutex_.
  std::mutex mutex_;
  Anchor anchor_;
  std::int64_t next_anchor_ns_ = 0;
};

}  // namespace tessera::device
