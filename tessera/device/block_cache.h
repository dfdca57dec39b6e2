// Large blocks of host memory that are asked for again and again, in the same sizes: the tensors of
// a training step. The kernel zeroes every page that it gives, one thread at a time, so a block
// that comes back is kept for the next who asks for its size.
//
// Invariant: held_bytes() <= peak_bytes(): idle blocks are kept only as far as they and those in
// use together never take more than was once in use at the same time. So a cache never raises the
// peak of the process, and a program that has been measured without it stays within that measure.
//
// A block serves requests down to 7/8 of its size. Of idle blocks the smallest that fits is taken;
// when room is needed, those that have been idle longest go back to the kernel.
//
// Threads: every function from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "tessera/device/host_memory.h"

namespace tessera::device {

class BlockCache {
 public:
  BlockCache() = default;
  // REQUIRES: everything was given back.
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // Aligned to a page; what is in it is undefined. Throws DeviceError if the kernel refuses even
  // after all idle blocks have gone back to it. REQUIRES: bytes > 0.
  void* take(std::size_t bytes);
  // False, and nothing done, if `data` is not a block of this cache.
  bool give_back(void* data);

  std::size_t live_bytes() const;  // in use
  std::size_t held_bytes() const;  // in use and idle
  std::size_t peak_bytes() const;  // most that was in use at once
  std::uint64_t num_mapped() const;

 private:
  struct Idle {
    HostPages pages;
    std::uint64_t since = 0;
  };
  using IdleBlocks = std::multimap<std::size_t, Idle>;  // by size

  // All of these with the mutex held.
  IdleBlocks::iterator find_idle(std::size_t bytes);
  void free_idle_until(std::size_t held_bytes);
  HostPages map_block(std::size_t bytes);

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  IdleBlocks idle_;
  std::map<std::uint64_t, IdleBlocks::iterator> oldest_;  // the same blocks by age
  std::unordered_map<void*, std::size_t> live_;
  std::size_t live_bytes_ = 0;
  std::size_t idle_bytes_ = 0;
  std::size_t peak_bytes_ = 0;
  std::uint64_t num_given_back_ = 0;
  std::uint64_t num_mapped_ = 0;
};

}  // namespace tessera::device
