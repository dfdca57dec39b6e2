// Regions of other processes' GPU memory that this process has opened. For CUDA sources only.
//
// CUDA maps an allocation of another process once, however often it is opened, and must not keep
// the mapping of one that is gone when its owner gets another at the same address: so all groups of
// a process share one table for a GPU, and close a region as soon as one of them hears that it is
// gone. Its owner frees a region only when no call uses it.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include <cuda_runtime_api.h>

namespace tessera::comm {

class PeerRegions {
 public:
  // This process's for that GPU, while somebody holds it.
  static std::shared_ptr<PeerRegions> open(int device_index);
  // Closes all.
  ~PeerRegions();
  PeerRegions(const PeerRegions&) = delete;
  PeerRegions& operator=(const PeerRegions&) = delete;

  // Null if it is not open. `heap` is CudaSharedHeap::id() of the owner.
  std::byte* find(std::uint64_t heap, std::uint64_t number) const;
  // Throws DeviceError if the driver cannot.
  std::byte* open_region(std::uint64_t heap, std::uint64_t number,
                         const cudaIpcMemHandle_t& handle);
  // Closes those of `heap` that are not listed, up to the number that the list is complete to.
  void keep_only(std::uint64_t heap, const std::set<std::uint64_t>& listed,
                 std::uint64_t complete_up_to);

 private:
  explicit PeerRegions(int device_index) : device_index_(device_index) {}

  const int device_index_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::byte*> regions_;  // guarded by mutex_
};

}  // namespace tessera::comm
