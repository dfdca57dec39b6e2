// Numbers in pinned memory by which a CUDA stream waits for a host thread: the stream stands still
// until a number is as high as it was told (cuStreamWaitValue32), and a host thread writes it.
//
// A flag is free again as soon as it is written: numbers only grow, so a stream that comes later
// still finds what it waits for. There are kNumFlags, allocated with the device: to allocate while
// a stream stands still might wait for it. Where they are all in use, or the driver has no such
// wait, start_wait() says so.
//
// Threads: any. set() calls no CUDA: it runs on threads that must not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace tessera::device {

class CudaFlags {
 public:
  static constexpr std::size_t kNumFlags = 4096;

  struct Flag {
    std::uint32_t index = 0;
    std::uint32_t number = 0;
  };

  // REQUIRES: the device is current.
  CudaFlags();
  CudaFlags(const CudaFlags&) = delete;
  CudaFlags& operator=(const CudaFlags&) = delete;
  // Gives the memory back; not the destructor, which may run on a thread that must call no CUDA.
  // REQUIRES: no stream waits.
  void close() noexcept;

  bool is_usable() const { return wait_value_ != nullptr && values_ != nullptr; }
  // What `stream` is given from now on starts when the flag has been set. Nothing: see above.
  std::optional<Flag> start_wait(cudaStream_t stream);
  void set(const Flag& flag);

 private:
  using WaitValue = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

  WaitValue wait_value_ = nullptr;
  std::uint32_t* values_ = nullptr;
  CUdeviceptr device_values_ = 0;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::uint32_t> numbers_;  // the last that was waited for, by flag
  std::vector<std::uint32_t> free_;
};

}  // namespace tessera::device
