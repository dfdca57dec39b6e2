// Leases of I/O memory from one region: page-aligned, exact in size, with a fixed bound.
//
// acquire() blocks until enough leases are released: this back-pressure keeps readers from running
// ahead of memory. Waiters are served in the order of their calls, so none starves; try_acquire()
// never overtakes a waiter.
//
// Invariants:
//  (1) Leases are multiples of kBlockBytes, aligned to it, and never overlap.
//  (2) The region is taken once, at construction; its size is the pool's whole cost.
//
// Leases of different sizes may leave gaps that suffice in total but not in one piece; the wait
// then ends when the leases between them are released. So a caller must not block here if other
// lease holders depend on it to make progress.
//
// Threads: every method may be called from any thread. Leases must be released before the pool is
// destroyed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "tessera/device/device.h"

namespace tessera::tier {

class BufferPool;

// Movable, not copyable; released on destruction.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { reset(); }

  void reset() noexcept;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }  // whole blocks

 private:
  friend class BufferPool;
  Lease(BufferPool& pool, std::byte* data, std::size_t bytes)
      : pool_(&pool), data_(data), bytes_(bytes) {}

  BufferPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class BufferPool {
 public:
  // `name` is for errors: "optimizer buffers". Takes whole_blocks(bytes) of `tier`, charged as
  // Role::kStaging.
  BufferPool(device::Device& device, Tier tier, std::size_t bytes, std::string name);
  ~BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Blocks until `bytes`, rounded up to whole blocks, are free in one piece; none for zero bytes.
  // Throws ConfigError if the pool is smaller than that, and what close() was given.
  [[nodiscard]] Lease acquire(std::size_t bytes);
  // Null if they are not free now, or if another caller waits.
  [[nodiscard]] std::optional<Lease> try_acquire(std::size_t bytes);
  // Fails all waiting and later calls with this error; the first error is kept.
  void close(std::exception_ptr reason);

  std::size_t capacity_bytes() const { return capacity_; }
  std::size_t free_bytes() const;
  std::size_t peak_bytes() const;  // leased at once
  std::size_t num_waits() const;   // calls of acquire() that had to wait

 private:
  friend class Lease;
  struct Piece {
    std::size_t bytes = 0;
    bool is_free = true;
  };
  std::size_t rounded_or_refused(std::size_t bytes) const;
  // The rest need the lock; give_back() takes it.
  void refuse_if_closed() const;
  std::optional<Lease> take(std::size_t bytes);
  void give_back(std::byte* data, std::size_t bytes) noexcept;
  void join_with_next(std::map<std::size_t, Piece>::iterator piece) noexcept;

  const std::string name_;
  const std::size_t capacity_;
  device::Memory region_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::map<std::size_t, Piece> pieces_;  // by offset, without gaps; free neighbours are joined
  std::list<std::size_t> waiters_;       // in the order in which they are served
  std::size_t leased_ = 0;
  std::size_t peak_ = 0;
  std::size_t num_waits_ = 0;
  std::exception_ptr closed_;
};

}  // namespace tessera::tier
