// Memory of this process that other processes of the host can map: where the shards and gradients
// of a rank lie whose peers read them in place (comm/shm_backend.h).
//
// It is one memfd as large as the host's memory, mapped whole: sparse, so that it costs what is
// used, and of one size, so that a peer maps it once and for good. Nothing of it has a name in the
// system; it is gone with the last process that has it open, however that ends.
//
// A process has at most one, while somebody holds it: the backends that share memory do, and each
// block that was taken from it. CPU devices take shards and gradients from it while it is there
// (host_memory.h).
//
// Threads: every method may be called from any thread.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tessera/device/arena_map.h"

namespace tessera::device {

class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  // This process's; made if there is none. Throws DeviceError with the reason and the way out where
  // the system does not give one.
  static std::shared_ptr<SharedHeap> open();
  // Null if nobody holds it.
  static std::shared_ptr<SharedHeap> current();

  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  int fd() const { return fd_; }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Where these bytes lie in it; nothing if not all of them do.
  std::optional<std::size_t> offset_of(const void* data, std::size_t bytes) const;

  // Null if it is full. Fresh pages are zero, others are not. `alignment` is a power of two.
  std::byte* allocate(std::size_t bytes, std::size_t alignment);
  // Gives whole pages back to the system.
  void free(std::byte* data) noexcept;

 private:
  SharedHeap(int fd, std::byte* data, std::size_t bytes);

  const int fd_;
  std::byte* const data_;
  const std::size_t bytes_;
  // Guarded by mutex_.
  std::mutex mutex_;
  ArenaMap map_;
  std::map<std::byte*, Extent> blocks_;  // by what allocate() returned
};

}  // namespace tessera::device
