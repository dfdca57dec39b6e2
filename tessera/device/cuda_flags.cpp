#include "tessera/device/cuda_flags.h"

#include <atomic>
#include <cstring>
#include <numeric>

namespace tessera::device {
namespace {

// By its address, so that programs need not be linked with the driver's library.
void* find_wait_value() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 12000,
                                                            cudaEnableDefault, &result);
#else
  const cudaError_t code =
      cudaGetDriverEntryPoint("cuStreamWaitValue32", &found, cudaEnableDefault, &result);
#endif
  if (code != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return found;
}

}  // namespace

CudaFlags::CudaFlags() : numbers_(kNumFlags, 0), free_(kNumFlags) {
  std::iota(free_.begin(), free_.end(), 0U);
  constexpr std::size_t kBytes = kNumFlags * sizeof(std::uint32_t);
  void* values = nullptr;
  void* device_values = nullptr;
  if (cudaHostAlloc(&values, kBytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess ||
      cudaHostGetDevicePointer(&device_values, values, 0) != cudaSuccess) {
    cudaGetLastError();  // without flags the host waits, and the next allocation says what is wrong
    cudaFreeHost(values);
    return;
  }
  std::memset(values, 0, kBytes);
  values_ = static_cast<std::uint32_t*>(values);
  device_values_ = reinterpret_cast<CUdeviceptr>(device_values);
  wait_value_ = reinterpret_cast<WaitValue>(find_wait_value());
}

void CudaFlags::close() noexcept {
  cudaFreeHost(values_);
  values_ = nullptr;
}

std::optional<CudaFlags::Flag> CudaFlags::start_wait(cudaStream_t stream) {
  Flag flag;
  {
    const std::lock_guard lock(mutex_);
    if (!is_usable() || free_.empty()) {
      return std::nullopt;
    }
    flag.index = free_.back();
    free_.pop_back();
    flag.number = ++numbers_[flag.index];
  }
  const CUresult code = wait_value_(stream, device_values_ + flag.index * sizeof(std::uint32_t),
                                    flag.number, CU_STREAM_WAIT_VALUE_GEQ);
  if (code != CUDA_SUCCESS) {
    set(flag);
    return std::nullopt;
  }
  return flag;
}

void CudaFlags::set(const Flag& flag) {
  std::atomic_ref<std::uint32_t>(values_[flag.index]).store(flag.number, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  free_.push_back(flag.index);
}

}  // namespace tessera::device
