#include "tessera/device/shared_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"
#include "tessera/device/host_info.h"
#include "tessera/device/host_memory.h"

namespace tessera::device {
namespace {

// The thread sanitizer leaves few addresses to a process. What does not fit stays private.
#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kMostBytes = std::size_t{256} << 20;
#else
constexpr std::size_t kMostBytes = std::numeric_limits<std::size_t>::max();
#endif

struct Current {
  std::mutex mutex;
  std::weak_ptr<SharedHeap> heap;
};
Current& current_heap() {
  static auto* const current = new Current();  // blocks may be freed while the process ends
  return *current;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Begins where a huge page can, so that what is aligned in the heap is so in memory. MAP_FAILED as
// mmap() does.
void* map_aligned(int fd, std::size_t bytes) {
  void* const reserved = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<std::uintptr_t>(reserved);
  const std::size_t before = round_up(address, kHugePageBytes) - address;
  void* const data = mmap(begin + before, bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    munmap(reserved, bytes + kHugePageBytes);
    return MAP_FAILED;
  }
  if (before > 0) {
    munmap(reserved, before);
  }
  munmap(begin + before + bytes, kHugePageBytes - before);
  return data;
}

}  // namespace

SharedHeap::SharedHeap(int fd, std::byte* data, std::size_t bytes)
    : fd_(fd), data_(data), bytes_(bytes), map_(bytes) {}

SharedHeap::~SharedHeap() {
  munmap(data_, bytes_);
  close(fd_);
}

std::shared_ptr<SharedHeap> SharedHeap::current() {
  Current& current = current_heap();
  const std::lock_guard lock(current.mutex);
  return current.heap.lock();
}

std::shared_ptr<SharedHeap> SharedHeap::open() {
  Current& current = current_heap();
  const std::lock_guard lock(current.mutex);
  if (auto heap = current.heap.lock()) {
    return heap;
  }
  TESSERA_CHECK(!address_space_limit(), DeviceError,
                "this process has a limit of address space (ulimit -v), and shared memory maps the "
                "memory of every rank");
  const std::size_t bytes =
      round_up(std::min(read_host_memory().total_bytes(), kMostBytes), kHugePageBytes);
  TESSERA_CHECK(bytes > 0, DeviceError, "the size of this host's memory could not be read");
  rlimit file_size{};
  TESSERA_CHECK(getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur >= bytes,
                DeviceError, "files of this process are limited to ", file_size.rlim_cur,
                " bytes (ulimit -f), and shared memory is a file of ", bytes);
  const int fd = memfd_create("tessera", MFD_CLOEXEC);
  TESSERA_CHECK(fd >= 0, DeviceError, "memfd_create: ", std::strerror(errno));
  void* const data = map_aligned(fd, bytes);
  if (data == MAP_FAILED || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    if (data != MAP_FAILED) {
      munmap(data, bytes);
    }
    close(fd);
    throw DeviceError(detail::concat("shared memory of ", bytes,
                                     " bytes could not be mapped: ", std::strerror(error)));
  }
  madvise(data, bytes, MADV_DONTDUMP);  // a core file would read all of it
  std::shared_ptr<SharedHeap> heap(new SharedHeap(fd, static_cast<std::byte*>(data), bytes));
  current.heap = heap;
  return heap;
}

std::optional<std::size_t> SharedHeap::offset_of(const void* data, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(data_);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at < begin || bytes > bytes_ || at - begin > bytes_ - bytes) {
    return std::nullopt;
  }
  return at - begin;
}

std::byte* SharedHeap::allocate(std::size_t bytes, std::size_t alignment) {
  // What is aligned to more than the map's own unit gets so much that an aligned range is inside.
  const std::size_t spare = alignment > kArenaAlignment ? alignment - kArenaAlignment : 0;
  const std::lock_guard lock(mutex_);
  const auto extent = map_.place(bytes + spare);
  if (!extent) {
    return nullptr;
  }
  std::byte* const data = data_ + round_up(extent->offset, alignment);
  blocks_.emplace(data, *extent);
  return data;
}

void SharedHeap::free(std::byte* data) noexcept {
  const std::size_t page = page_bytes();
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(data);
  const Extent extent = block->second;
  const std::size_t first = round_up(extent.offset, page);
  const std::size_t end = extent.end() / page * page;
  if (first < end) {
    // Where the file system refuses, the pages are used again by later blocks.
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
              static_cast<off_t>(end - first));
  }
  map_.release(extent);
  blocks_.erase(block);
}

}  // namespace tessera::device
