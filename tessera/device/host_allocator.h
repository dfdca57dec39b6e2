// MemoryKind on a machine without an accelerator: host memory, charged as what it stands for.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstddef>

#include "tessera/device/device_cpu.h"

namespace tessera::device {

class HostAllocator {
 public:
  explicit HostAllocator(CpuDeviceOptions options);

  Memory allocate(MemoryKind kind, std::size_t bytes, Role role, std::size_t alignment);
  MemoryInfo memory_info() const;

 private:
  const CpuDeviceOptions options_;
  // The kernel promises more than it has and ends the process at the first touch; what can never
  // fit is refused here, where a message is still possible.
  const std::size_t total_bytes_;
  std::atomic<bool> has_noticed_{false};
};

}  // namespace tessera::device
