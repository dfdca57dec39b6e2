#include "tessera/tier/io_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace tessera::tier {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::uintptr_t kSmallPageBytes = 4096;

std::size_t whole_huge_pages(std::size_t bytes) {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

void prefer_huge_pages(std::byte* data, std::size_t bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + kSmallPageBytes - 1) / kSmallPageBytes * kSmallPageBytes;
  const std::uintptr_t end = begin + bytes;
  if (end - begin >= kHugePageBytes) {
    // Refused where the kernel has none: small pages serve as well.
    ::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
}

IoMemory::IoMemory(std::size_t bytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, whole_huge_pages(bytes))),
            std::free),
      bytes_(bytes) {
  if (data_ == nullptr) {
    throw std::bad_alloc();
  }
  prefer_huge_pages(data_.get(), whole_huge_pages(bytes));
  std::uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (std::size_t i = 0; i + sizeof state <= bytes; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(data_.get() + i, &state, sizeof state);
  }
}

}  // namespace tessera::tier
