#include "tessera/device/cuda_event_pool.h"

#include "tessera/device/cuda_call.h"

namespace tessera::device {

CudaEventPool::~CudaEventPool() {
  for (cudaEvent_t event : free_) {
    cudaEventDestroy(event);  // fails only when the driver has shut down, with all its events
  }
}

cudaEvent_t CudaEventPool::take() {
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

void CudaEventPool::give_back(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

}  // namespace tessera::device
