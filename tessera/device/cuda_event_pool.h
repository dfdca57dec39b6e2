// CUDA events, reused: making one costs more than recording it, and waits for every thread that is
// just handing work to a stream, also one that is blocked because that stream is full. So they are
// made many at a time, as many as there are, and without the pool's mutex: host functions of
// streams give events back.
//
// Threads: any. The mutex is never held around a call of CUDA.
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
    std::unique_lock lock(mutex_);
    if (free_.empty()) {
      const std::size_t num_more = std::max(num_events_, kFirstEvents);
      lock.unlock();
      std::vector<cudaEvent_t> made = make(num_more);
      lock.lock();
      num_events_ += made.size();
      free_.reserve(num_events_);  // so that whoever gives one back allocates nothing
      free_.insert(free_.end(), made.begin(), made.end());
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

  std::vector<cudaEvent_t> make(std::size_t num) const {
    const CudaDeviceScope scope(device_index_);
    std::vector<cudaEvent_t> events(num);
    for (std::size_t i = 0; i < num; ++i) {
      const cudaError_t code = cudaEventCreateWithFlags(&events[i], flags_);
      if (code != cudaSuccess) {
        for (std::size_t made = 0; made < i; ++made) {
          cudaEventDestroy(events[made]);
        }
        check_cuda("cudaEventCreateWithFlags", code);
      }
    }
    return events;
  }

  const int device_index_;
  const unsigned flags_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<cudaEvent_t> free_;
  std::size_t num_events_ = 0;  // all that were made
};

}  // namespace tessera::device
