// CUDA events, reused: making one costs more than recording it.
//
// Threads: any.
#pragma once

#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

namespace tessera::device {

class CudaEventPool {
 public:
  // `flags` as cudaEventCreateWithFlags takes them.
  CudaEventPool(int device_index, unsigned flags) : device_index_(device_index), flags_(flags) {}
  ~CudaEventPool();
  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;

  cudaEvent_t take();
  void give_back(cudaEvent_t event);

 private:
  const int device_index_;
  const unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;  // guarded by mutex_
};

}  // namespace tessera::device
