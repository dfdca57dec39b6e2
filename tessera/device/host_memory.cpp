#include "tessera/device/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tessera/core/resource_limits.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"
#include "tessera/device/host_threads.h"

namespace tessera::device {
namespace {

[[noreturn]] void throw_no_memory(Tier what, std::size_t bytes) {
  // Whatever the machine has: this process may not have it.
  TESSERA_CHECK(!address_space_limit(), DeviceError, to_string(what),
                " memory: ", no_memory_text(bytes));
  const HostMemoryInfo host = read_host_memory();
  throw DeviceError(detail::concat(
      to_string(what), " memory: asked for ", bytes, " bytes (", approximate_bytes(bytes), "), ",
      host.available_bytes(), " of ", host.total_bytes(),
      " are available on the host; lower the byte budget, or place more on another tier"));
}

// Gives back and discharges exactly what was taken and charged.
Memory charged(const HostMemoryRequest& request, void* data, std::size_t taken_bytes,
               std::function<void()> give_back) {
  if (request.ledger == nullptr) {
    return Memory(data, request.bytes, std::move(give_back));
  }
  const Tier tier = request.tier;
  request.ledger->charge(tier, request.role, taken_bytes);
  return Memory(data, request.bytes,
                [ledger = request.ledger, tier, role = request.role, taken_bytes,
                 give_back = std::move(give_back)] {
                  give_back();
                  ledger->discharge(tier, role, taken_bytes);
                });
}

// Loops over states and gradients run over much memory once: with small pages they wait for
// addresses.
HostPages map_for(const HostMemoryRequest& request) {
  if (request.bytes < kHugePageBytes) {
    return map_pages(request.bytes, request.alignment, request.tier);
  }
  const HostPages pages =
      map_pages(request.bytes, std::max(request.alignment, kHugePageBytes), request.tier);
  prefer_huge_pages(pages.data, pages.bytes);
  return pages;
}

}  // namespace

void check_alignment(std::size_t alignment) {
  TESSERA_INVARIANT(alignment >= 16 && std::has_single_bit(alignment), "alignment=", alignment,
                    " is not a power of two of at least 16");
}

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

HostPages map_pages(std::size_t bytes, std::size_t alignment, Tier what) {
  check_alignment(alignment);
  const std::size_t page = page_bytes();
  // mmap aligns to pages; for more, map so much that an aligned range is inside, and cut.
  const std::size_t spare = alignment > page ? alignment - page : 0;
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() - spare - page) {
    throw_no_memory(what, bytes);
  }
  const std::size_t rounded = (bytes + page - 1) / page * page;
  void* const start =
      mmap(nullptr, rounded + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    throw_no_memory(what, bytes);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  const std::size_t before = (alignment - address % alignment) % alignment;
  auto* const data = static_cast<std::byte*>(start) + before;
  if (before > 0) {
    munmap(start, before);
  }
  if (spare > before) {
    munmap(data + rounded, spare - before);
  }
  return {data, rounded};
}

void unmap_pages(const HostPages& pages) noexcept { munmap(pages.data, pages.bytes); }

void prefer_huge_pages(void* data, std::size_t bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t page = page_bytes();
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t end = begin + bytes;
  if (end - begin >= kHugePageBytes) {
    // Refused where the kernel has none: small pages serve as well.
    madvise(static_cast<std::byte*>(data) + (first - begin), end - first, MADV_HUGEPAGE);
  }
}

void touch_pages(const HostPages& pages) {
  for_each_piece((pages.bytes + kTouchedPieceBytes - 1) / kTouchedPieceBytes,
                 [&](std::size_t piece) {
                   auto* const data = static_cast<volatile unsigned char*>(pages.data);
                   const std::size_t end = std::min(pages.bytes, (piece + 1) * kTouchedPieceBytes);
                   for (std::size_t at = piece * kTouchedPieceBytes; at < end; at += page_bytes()) {
                     data[at] = 0;
                   }
                 });
}

bool lock_pages(const HostPages& pages) noexcept { return mlock(pages.data, pages.bytes) == 0; }

Memory allocate_host_memory(const HostMemoryRequest& request) {
  check_alignment(request.alignment);
  if (request.bytes == 0) {
    return Memory();
  }
  const bool is_pinned = request.tier == Tier::kPinned;
  if (!is_pinned && request.bytes < kPagesFromBytes) {
    void* data = nullptr;
    if (posix_memalign(&data, request.alignment, request.bytes) != 0) {
      throw_no_memory(request.tier, request.bytes);
    }
    return charged(request, data, request.bytes, [data] { std::free(data); });
  }

  const HostPages pages = map_for(request);
  if (is_pinned && !lock_pages(pages) && request.on_not_locked) {
    const char* const why = std::strerror(errno);
    const auto limit = locked_memory_limit_bytes();
    request.on_not_locked(
        detail::concat("pinned memory: ", pages.bytes, " bytes could not be page-locked (", why,
                       "; the limit on locked memory is ",
                       limit ? exact_bytes(static_cast<std::int64_t>(*limit)) : "unlimited",
                       "); they may be paged out, which costs speed; raise it with `ulimit -l`"));
  }
  return charged(request, pages.data, pages.bytes, [pages] { unmap_pages(pages); });
}

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
