#include "tessera/tier/io_memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tessera/device/host_memory.h"

namespace tessera::tier {
namespace {

using device::kHugePageBytes;

std::size_t whole_huge_pages(std::size_t bytes) {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

IoMemory::IoMemory(std::size_t bytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, whole_huge_pages(bytes))),
            std::free),
      bytes_(bytes) {
  if (data_ == nullptr) {
    throw std::bad_alloc();
  }
  device::prefer_huge_pages(data_.get(), whole_huge_pages(bytes));
  std::uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (std::size_t i = 0; i + sizeof state <= bytes; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(data_.get() + i, &state, sizeof state);
  }
}

}  // namespace tessera::tier
