#include "tessera/device/cuda_shared_heap.h"

#include <random>
#include <utility>

#include "tessera/device/cuda_call.h"

namespace tessera::device {
namespace {

struct CurrentCudaHeaps {
  std::mutex mutex;
  std::map<int, std::weak_ptr<CudaSharedHeap>> heaps;  // by GPU
};
CurrentCudaHeaps& current_heaps() {
  static auto* const current =
      new CurrentCudaHeaps();  // blocks may be freed while the process ends
  return *current;
}

std::uint64_t random_id() {
  std::random_device random;
  return (std::uint64_t{random()} << 32U) | random();
}

}  // namespace

CudaSharedHeap::CudaSharedHeap(int device_index) : device_index_(device_index), id_(random_id()) {}

CudaSharedHeap::~CudaSharedHeap() {
  while (!regions_.empty()) {  // blocks hold the heap, so there are none left; nor regions
    free_region(regions_.begin());
  }
}

std::shared_ptr<CudaSharedHeap> CudaSharedHeap::current(int device_index) {
  CurrentCudaHeaps& current = current_heaps();
  const std::lock_guard lock(current.mutex);
  const auto found = current.heaps.find(device_index);
  return found == current.heaps.end() ? nullptr : found->second.lock();
}

std::shared_ptr<CudaSharedHeap> CudaSharedHeap::open(int device_index) {
  CurrentCudaHeaps& current = current_heaps();
  const std::lock_guard lock(current.mutex);
  std::weak_ptr<CudaSharedHeap>& known = current.heaps[device_index];
  if (auto heap = known.lock()) {
    return heap;
  }
  std::shared_ptr<CudaSharedHeap> heap(new CudaSharedHeap(device_index));
  known = heap;
  return heap;
}

CudaSharedHeap::Regions::iterator CudaSharedHeap::add_region(std::size_t bytes) {
  const CudaDeviceScope scope(device_index_);
  const std::size_t whole = (bytes + kRegionUnit - 1) / kRegionUnit * kRegionUnit;
  void* data = nullptr;
  if (cudaMalloc(&data, whole) != cudaSuccess) {
    cudaGetLastError();
    return regions_.end();
  }
  Region region;
  region.bytes = whole;
  try {
    TESSERA_CUDA_CALL(cudaIpcGetMemHandle, &region.handle, data);
  } catch (...) {
    cudaFree(data);
    throw;
  }
  region.number = ++last_number_;
  ++version_;
  return regions_.emplace(static_cast<std::byte*>(data), Owned{region, ArenaMap(whole)}).first;
}

void CudaSharedHeap::free_region(Regions::iterator region) noexcept {
  int former = device_index_;
  cudaGetDevice(&former);
  cudaSetDevice(device_index_);
  cudaFree(region->first);  // fails only when the driver has shut down
  cudaSetDevice(former);
  regions_.erase(region);
  ++version_;
}

CudaSharedHeap::Regions::const_iterator CudaSharedHeap::region_around(const void* data) const {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(data));
  const auto above = regions_.upper_bound(at);
  if (above == regions_.begin()) {
    return regions_.end();
  }
  const auto region = std::prev(above);
  return at < region->first + region->second.region.bytes ? region : regions_.end();
}

std::byte* CudaSharedHeap::allocate(std::size_t bytes, std::size_t alignment) {
  // What is aligned to more than the map's own unit gets so much that an aligned range is inside.
  const std::size_t spare = alignment > kArenaAlignment ? alignment - kArenaAlignment : 0;
  const std::size_t needed = bytes + spare;
  const std::lock_guard lock(mutex_);
  std::optional<Extent> extent;
  auto region = regions_.begin();
  for (; needed <= kRegionUnit / 2 && region != regions_.end(); ++region) {
    if ((extent = region->second.map.place(needed))) {
      break;
    }
  }
  if (!extent) {
    region = add_region(needed);
    if (region == regions_.end()) {
      return nullptr;
    }
    extent = region->second.map.place(needed);
  }
  std::byte* const start = region->first + extent->offset;
  std::byte* const data =
      start + (alignment - reinterpret_cast<std::uintptr_t>(start) % alignment) % alignment;
  blocks_.emplace(data, *extent);
  return data;
}

void CudaSharedHeap::free(std::byte* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(data);
  const auto around = region_around(data);
  const auto region = regions_.find(around->first);
  region->second.map.release(block->second);
  blocks_.erase(block);
  if (region->second.map.stats().num_blocks == 0) {
    free_region(region);
  }
}

std::optional<CudaSharedHeap::Place> CudaSharedHeap::place_of(const void* data,
                                                              std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto region = region_around(data);
  if (region == regions_.end()) {
    return std::nullopt;
  }
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(data) - region->first);
  if (bytes > region->second.region.bytes - offset) {
    return std::nullopt;
  }
  return Place{region->second.region.number, offset};
}

std::vector<CudaSharedHeap::Region> CudaSharedHeap::regions() const {
  const std::lock_guard lock(mutex_);
  std::vector<Region> all;
  for (const auto& [data, owned] : regions_) {
    all.push_back(owned.region);
  }
  return all;
}

std::uint64_t CudaSharedHeap::version() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

}  // namespace tessera::device
