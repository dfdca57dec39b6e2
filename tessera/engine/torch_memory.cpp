// The header of torch's device allocators includes its own copy of fmt, whose compiled part no
// library brings along.
#define FMT_HEADER_ONLY 1

#include <c10/core/CachingDeviceAllocator.h>

#include "tessera/engine/tensor_memory.h"

namespace tessera {

TorchMemory torch_memory(int cuda_device) {
  c10::DeviceAllocator* const allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
  if (!allocator->initialized()) {
    return {};  // there has been no tensor yet
  }
  const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(cuda_device));
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {stats.allocated_bytes[kAll].current, stats.reserved_bytes[kAll].current,
          stats.allocated_bytes[kAll].peak};
}

}  // namespace tessera
