// Calls into the CUDA runtime, with errors as DeviceError. For CUDA sources only.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include "tessera/core/error.h"

namespace tessera::device {

// The failed call, its code in number and name, and what a user can do about it.
std::string cuda_error_message(const char* call, cudaError_t code);

inline void check_cuda(const char* call, cudaError_t code) {
  if (code != cudaSuccess) [[unlikely]] {
    // An error of one call would otherwise be found again by whoever asks next, torch included.
    cudaGetLastError();
    throw DeviceError(cuda_error_message(call, code));
  }
}

#define TESSERA_CUDA_CALL(function, ...) \
  ::tessera::device::check_cuda(#function, function(__VA_ARGS__))

// Makes a device current on this thread for the time of a scope. Null streams and allocations
// belong to the current device.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(int index) {
    if (cudaGetDevice(&former_) == cudaSuccess && former_ != index) {
      TESSERA_CUDA_CALL(cudaSetDevice, index);
      is_changed_ = true;
    }
  }
  ~CudaDeviceScope() {
    if (is_changed_) {
      cudaSetDevice(former_);
    }
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  int former_ = 0;
  bool is_changed_ = false;
};

}  // namespace tessera::device
