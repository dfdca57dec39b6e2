// Memory of the host: from the heap while it is small, in pages of its own from kPagesFromBytes on
// and whenever it is page-locked (locks work on whole pages and do not nest, so a locked block
// must not share a page with a neighbour).
//
// Sizes are exact: heap blocks take the bytes asked for, pages are rounded up to the next page,
// nothing is rounded to powers of two. The ledger is charged what was taken. From kHugePageBytes on
// pages begin where a huge one can, and huge ones are asked for.
//
// While ranks of this host read each other's memory, shards and gradients come from the shared heap
// (shared_heap.h), in the same sizes; all else, the states above all, stays private.
//
// Threads: every function may be called from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/shared_heap.h"

namespace tessera::device {

inline constexpr std::size_t kPagesFromBytes = std::size_t{64} << 10;

// REQUIRES: `alignment` is a power of two of at least 16; anything else is an InternalError.
void check_alignment(std::size_t alignment);
std::size_t page_bytes();

// Pages of their own, as they come from the kernel: zeroed when first touched.
struct HostPages {
  void* data = nullptr;
  std::size_t bytes = 0;  // whole pages
};
// Throws DeviceError if the kernel refuses. `what` is the kind of memory, for the message.
HostPages map_pages(std::size_t bytes, std::size_t alignment, Tier what);
void unmap_pages(const HostPages& pages) noexcept;
// Asks for huge pages where whole ones fit. A hint; failure is harmless. REQUIRES: before the first
// use of the memory.
void prefer_huge_pages(void* data, std::size_t bytes) noexcept;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
// Writes to every page once, so that the kernel has given and zeroed them all: with as many threads
// as cores (host_threads.h), since one alone zeroes a fraction of what memory can take. Before
// anything else uses it.
void touch_pages(const HostPages& pages);
// What one thread does of it at a time: no two threads are in one huge page.
inline constexpr std::size_t kTouchedPieceBytes = 32 * kHugePageBytes;
// Best effort: false if the limit on locked memory (RLIMIT_MEMLOCK) does not allow it.
bool lock_pages(const HostPages& pages) noexcept;

struct HostMemoryRequest {
  Tier tier = Tier::kHost;
  std::size_t bytes = 0;
  std::size_t alignment = 256;
  Role role = Role::kOther;
  Ledger* ledger = nullptr;  // may be null; must outlive the memory
  // Called with a sentence for people if `tier` is kPinned and the pages could not be locked.
  // The memory is good all the same, and charged as pinned.
  std::function<void(const std::string&)> on_not_locked;
  // Taken from there while it has free space. Null: private memory.
  std::shared_ptr<SharedHeap> heap;
};
Memory allocate_host_memory(const HostMemoryRequest& request);

// Memory of a machine without an accelerator: the host's, charged as the tier it is asked for.
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
