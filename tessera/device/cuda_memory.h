// Memory of one GPU, and host memory that it reads and writes by itself; charged to the ledger.
//
// Pinned memory takes the bytes asked for rounded to pages: cudaHostAlloc may round up a lot.
// Registering pages one by one that the kernel has not even given yet is what makes it slow, so
// they are asked for as huge pages and touched by all cores first. What that costs is counted. On a
// machine with several NUMA nodes they come from the GPU's own, if it has them.
//
// While ranks of this host read each other's memory, shards and gradients on the GPU come from the
// heap that they share (cuda_shared_heap.h), in the same sizes; all else stays private.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"

namespace tessera::device {

class CudaMemory {
 public:
  // `device_name` is for messages. `ledger` may be null; it outlives the memory given out.
  CudaMemory(int device_index, std::string device_name, std::size_t total_bytes, Ledger* ledger);

  // As Device's.
  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment);
  MemoryInfo info() const;
  PinStats pin_stats() const;

 private:
  Memory allocate_pinned(std::size_t bytes, Role role, std::size_t alignment);
  Memory allocate_device(std::size_t bytes, Role role, std::size_t alignment);
  Memory charged(Tier tier, void* data, std::size_t bytes, std::size_t taken_bytes, Role role,
                 std::function<void()> give_back);
  // The report where there is a ledger, or the bare numbers.
  std::string shortage(Tier tier, std::size_t asked_bytes, const MemoryInfo& memory) const;

  const int device_index_;
  const std::string device_name_;
  const std::size_t total_bytes_;
  const std::optional<int> numa_node_;  // near the GPU
  const std::uint64_t shared_id_;       // of MemoryInfo
  Ledger* const ledger_;

  mutable std::mutex mutex_;
  PinStats pin_stats_;  // guarded by mutex_
};

}  // namespace tessera::device
