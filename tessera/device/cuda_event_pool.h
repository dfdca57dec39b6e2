// CUDA events, reused: making one costs more than recording it, and waits for every thread that is
// just handing work to a stream, also one that is blocked because that stream is full. So they are
// made many at a time, as many as there are.
//
// Threads: any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

#include "tessera/device/cuda_call.h"

namespace tessera::device {

class CudaEventPool {
 public:
  // `flags` as cudaEventCreateWithFlags takes them.
  CudaEventPool(int device_index, unsigned flags) : device_index_(device_index), flags_(flags) {}
  ~CudaEventPool() {
    for (cudaEvent_t event : free_) {
      cudaEventDestroy(event);  // fails only when the driver has shut down, with all its events
    }
  }
  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;

  cudaEvent_t take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      make_some();
    }
    const cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  static constexpr std::size_t kFirstEvents = 256;

  void make_some() {
    const CudaDeviceScope scope(device_index_);
    const std::size_t num_more = std::max(num_events_, kFirstEvents);
    free_.reserve(num_events_ + num_more);
    for (std::size_t i = 0; i < num_more; ++i) {
      cudaEvent_t event = nullptr;
      TESSERA_CUDA_CALL(cudaEventCreateWithFlags, &event, flags_);
      free_.push_back(event);
      ++num_events_;
    }
  }

  const int device_index_;
  const unsigned flags_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<cudaEvent_t> free_;
  std::size_t num_events_ = 0;  // all that were made
};

}  // namespace tessera::device
