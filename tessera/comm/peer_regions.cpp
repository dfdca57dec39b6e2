#include "tessera/comm/peer_regions.h"

#include "tessera/device/cuda_call.h"

namespace tessera::comm {

std::shared_ptr<PeerRegions> PeerRegions::open(int device_index) {
  struct Known {
    std::mutex mutex;
    std::map<int, std::weak_ptr<PeerRegions>> tables;  // by GPU
  };
  static auto* const known = new Known();
  const std::lock_guard lock(known->mutex);
  std::weak_ptr<PeerRegions>& table = known->tables[device_index];
  if (auto regions = table.lock()) {
    return regions;
  }
  std::shared_ptr<PeerRegions> regions(new PeerRegions(device_index));
  table = regions;
  return regions;
}

PeerRegions::~PeerRegions() {
  int former = device_index_;
  cudaGetDevice(&former);
  cudaSetDevice(device_index_);
  for (const auto& [key, data] : regions_) {
    cudaIpcCloseMemHandle(data);  // fails only when the driver has shut down
  }
  cudaSetDevice(former);
}

std::byte* PeerRegions::find(std::uint64_t heap, std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find({heap, number});
  return found == regions_.end() ? nullptr : found->second;
}

std::byte* PeerRegions::open_region(std::uint64_t heap, std::uint64_t number,
                                    const cudaIpcMemHandle_t& handle) {
  const std::lock_guard lock(mutex_);
  std::byte*& region = regions_[{heap, number}];
  if (region == nullptr) {
    const device::CudaDeviceScope scope(device_index_);
    void* data = nullptr;
    if (const cudaError_t code =
            cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
        code != cudaSuccess) {
      regions_.erase({heap, number});
      device::check_cuda("cudaIpcOpenMemHandle", code);
    }
    region = static_cast<std::byte*>(data);
  }
  return region;
}

void PeerRegions::keep_only(std::uint64_t heap, const std::set<std::uint64_t>& listed,
                            std::uint64_t complete_up_to) {
  const std::lock_guard lock(mutex_);
  const device::CudaDeviceScope scope(device_index_);
  for (auto region = regions_.lower_bound({heap, 0}); region != regions_.end() &&
                                                      region->first.first == heap &&
                                                      region->first.second <= complete_up_to;) {
    if (listed.count(region->first.second) > 0) {
      ++region;
      continue;
    }
    TESSERA_CUDA_CALL(cudaIpcCloseMemHandle, region->second);
    region = regions_.erase(region);
  }
}

}  // namespace tessera::comm
