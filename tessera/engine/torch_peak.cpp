// The header of torch's device allocators includes its own copy of fmt, whose compiled part no
// library brings along.
#define FMT_HEADER_ONLY 1

#include <c10/core/CachingDeviceAllocator.h>

#include "tessera/engine/tensor_memory.h"

namespace tessera {

std::int64_t torch_peak_bytes(int cuda_device) {
  return c10::getDeviceAllocator(c10::DeviceType::CUDA)
      ->getDeviceStats(static_cast<c10::DeviceIndex>(cuda_device))
      .allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
      .peak;
}

}  // namespace tessera
