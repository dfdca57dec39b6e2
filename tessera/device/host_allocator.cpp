#include "tessera/device/host_allocator.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"
#include "tessera/device/host_memory.h"

namespace tessera::device {

HostAllocator::HostAllocator(CpuDeviceOptions options, bool device_is_host)
    : options_(std::move(options)),
      device_is_host_(device_is_host),
      total_bytes_(read_host_memory().total_bytes()) {}

std::string HostAllocator::shortage(Tier tier, std::size_t bytes) const {
  const MemoryInfo memory = memory_info();
  if (options_.ledger != nullptr) {
    return memory_report(*options_.ledger, tier, bytes, memory.free_bytes, memory.total_bytes,
                         device_is_host_);
  }
  return detail::concat(to_string(tier), " memory: asked for ", bytes, " bytes (",
                        approximate_bytes(bytes), "), ", memory.free_bytes,
                        " are free and this process may use ", memory.total_bytes,
                        "; lower the byte budget, or place more on another tier");
}

Memory HostAllocator::allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) {
  // A machine whose size could not be read has no limit that we know of.
  TESSERA_CHECK(total_bytes_ == 0 || bytes <= total_bytes_, DeviceError, shortage(tier, bytes));
  HostMemoryRequest request;
  request.tier = tier;
  request.bytes = bytes;
  request.alignment = alignment;
  request.role = role;
  request.ledger = options_.ledger;
  request.on_not_locked = [this](const std::string& message) {
    if (options_.notice && !has_noticed_.exchange(true)) {
      options_.notice(message);
    }
  };
  return allocate_host_memory(request);
}

MemoryInfo HostAllocator::memory_info() const {
  const HostMemoryInfo host = read_host_memory();
  return {host.total_bytes(), host.available_bytes()};
}

}  // namespace tessera::device
