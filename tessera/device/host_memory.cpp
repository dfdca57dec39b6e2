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

// Taken from the heap of the request, or from the system.
struct HostBlock {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::function<void()> give_back;
};

// Gives back and discharges exactly what was taken and charged.
Memory charged(const HostMemoryRequest& request, HostBlock block) {
  if (request.ledger == nullptr) {
    return Memory(block.data, request.bytes, std::move(block.give_back));
  }
  request.ledger->charge(request.tier, request.role, block.bytes);
  return Memory(block.data, request.bytes,
                [ledger = request.ledger, tier = request.tier, role = request.role,
                 taken_bytes = block.bytes, give_back = std::move(block.give_back)] {
                  give_back();
                  ledger->discharge(tier, role, taken_bytes);
                });
}

HostBlock take_shared(const HostMemoryRequest& request, std::size_t bytes, std::size_t alignment) {
  std::byte* const data = request.heap ? request.heap->allocate(bytes, alignment) : nullptr;
  return {data, bytes, [heap = request.heap, data] { heap->free(data); }};
}

HostBlock take_small(const HostMemoryRequest& request) {
  if (HostBlock block = take_shared(request, request.bytes, request.alignment); block.data) {
    return block;
  }
  void* data = nullptr;
  if (posix_memalign(&data, request.alignment, request.bytes) != 0) {
    throw_no_memory(request.tier, request.bytes);
  }
  return {data, request.bytes, [data] { std::free(data); }};
}

// Loops over states and gradients run over much memory once: with small pages they wait for
// addresses.
HostPages map_for(const HostMemoryRequest& request, std::size_t alignment) {
  const HostPages pages = map_pages(request.bytes, alignment, request.tier);
  prefer_huge_pages(pages.data, pages.bytes);
  return pages;
}

HostBlock take_pages(const HostMemoryRequest& request) {
  const std::size_t whole = request.bytes < kHugePageBytes ? page_bytes() : kHugePageBytes;
  const std::size_t alignment = std::max(request.alignment, whole);
  const std::size_t rounded = (request.bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  HostBlock block = take_shared(request, rounded, alignment);
  if (block.data == nullptr) {
    const HostPages pages = map_for(request, alignment);
    return {pages.data, pages.bytes, [pages] { unmap_pages(pages); }};
  }
  if (request.tier == Tier::kPinned) {  // what is mapped for itself is unlocked with its mapping
    block.give_back = [give_back = std::move(block.give_back), data = block.data, rounded] {
      munlock(data, rounded);
      give_back();
    };
  }
  return block;
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
    return charged(request, take_small(request));
  }

  HostBlock pages = take_pages(request);
  if (is_pinned && !lock_pages({pages.data, pages.bytes}) && request.on_not_locked) {
    const char* const why = std::strerror(errno);
    const auto limit = locked_memory_limit_bytes();
    request.on_not_locked(
        detail::concat("pinned memory: ", pages.bytes, " bytes could not be page-locked (", why,
                       "; the limit on locked memory is ",
                       limit ? exact_bytes(static_cast<std::int64_t>(*limit)) : "unlimited",
                       "); they may be paged out, which costs speed; raise it with `ulimit -l`"));
  }
  return charged(request, std::move(pages));
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
  if (role == Role::kShard || role == Role::kGradient) {
    request.heap = SharedHeap::current();
  }
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
