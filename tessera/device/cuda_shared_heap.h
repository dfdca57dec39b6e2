// Memory of one GPU that other processes of the host can map: where the shards and gradients of a
// rank lie whose peers read them in place (comm/ipc_backend.h). SharedHeap's counterpart.
//
// It is made of regions, each one cudaMalloc() whose handle is exported once: whole units of
// kRegionUnit, because what the driver puts smaller allocations into would be exported with them.
// What is large has a region of its own, small blocks share some. A region is freed with its last
// block; its number is not used again, so that a peer never takes a new one for it.
//
// A process has at most one for a GPU, while somebody holds it: the backends that share memory do,
// and each block that was taken from it. CUDA devices take shards and gradients from it while it is
// there (cuda_memory.h).
//
// Threads: every method may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "tessera/device/arena_map.h"

namespace tessera::device {

class CudaSharedHeap {
 public:
  static constexpr std::size_t kRegionUnit = std::size_t{2} << 20;

  // This process's for that GPU; made if there is none.
  static std::shared_ptr<CudaSharedHeap> open(int device_index);
  // Null if nobody holds it. Touches no GPU.
  static std::shared_ptr<CudaSharedHeap> current(int device_index);

  ~CudaSharedHeap();
  CudaSharedHeap(const CudaSharedHeap&) = delete;
  CudaSharedHeap& operator=(const CudaSharedHeap&) = delete;

  // For peers to tell this heap from one that the same rank had before.
  std::uint64_t id() const { return id_; }

  // Null if the GPU has no memory left. `alignment` is a power of two.
  std::byte* allocate(std::size_t bytes, std::size_t alignment);
  // Frees the region, too, if nothing else is in it.
  void free(std::byte* data) noexcept;

  struct Place {
    std::uint64_t region = 0;
    std::size_t offset = 0;
  };
  // Where these bytes lie in it; nothing if not all of them do.
  std::optional<Place> place_of(const void* data, std::size_t bytes) const;

  struct Region {
    std::uint64_t number = 0;  // from 1
    std::size_t bytes = 0;
    cudaIpcMemHandle_t handle{};
  };
  std::vector<Region> regions() const;
  // Changes with what regions() gives.
  std::uint64_t version() const;

 private:
  explicit CudaSharedHeap(int device_index);

  struct Owned {
    Region region;
    ArenaMap map;
  };
  using Regions = std::map<std::byte*, Owned>;  // by where they begin

  Regions::iterator add_region(std::size_t bytes);  // the end if there is no memory left
  void free_region(Regions::iterator region) noexcept;
  Regions::const_iterator region_around(const void* data) const;

  const int device_index_;
  const std::uint64_t id_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Regions regions_;
  std::map<std::byte*, Extent> blocks_;  // by what allocate() returned
  std::uint64_t last_number_ = 0;
  std::uint64_t version_ = 0;
};

}  // namespace tessera::device
