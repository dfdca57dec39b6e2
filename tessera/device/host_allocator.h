// Tier on a machine without an accelerator: host memory, charged as what it stands for.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include "tessera/device/device_cpu.h"

namespace tessera::device {

class HostAllocator {
 public:
  // `device_is_host`: what is kDevice and what is kHost are one memory. Only for messages.
  HostAllocator(CpuDeviceOptions options, bool device_is_host);

  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment);
  MemoryInfo memory_info() const;

 private:
  std::string shortage(Tier tier, std::size_t bytes) const;

  const CpuDeviceOptions options_;
  const bool device_is_host_;
  // The kernel promises more than it has and ends the process at the first touch; what can never
  // fit is refused here, where a message is still possible.
  const std::size_t total_bytes_;
  std::atomic<bool> has_noticed_{false};
};

}  // namespace tessera::device
