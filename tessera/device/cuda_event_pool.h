// CUDA events, reused: making one costs more than recording it.
//
// Threads: any.
#pragma once

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
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    const CudaDeviceScope scope(device_index_);
    cudaEvent_t event = nullptr;
    TESSERA_CUDA_CALL(cudaEventCreateWithFlags, &event, flags_);
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  const int device_index_;
  const unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;  // guarded by mutex_
};

}  // namespace tessera::device
