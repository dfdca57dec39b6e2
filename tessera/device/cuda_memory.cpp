#include "tessera/device/cuda_memory.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/core/ledger.h"
#include "tessera/core/units.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_shared_heap.h"
#include "tessera/device/host_info.h"
#include "tessera/device/host_memory.h"
#include "tessera/device/numa.h"

namespace tessera::device {
namespace {

// cudaMalloc's alignment, by its documentation.
constexpr std::size_t kCudaAlignment = 256;

MemoryInfo host_memory_info() {
  const HostMemoryInfo host = read_host_memory();
  return {host.total_bytes(), host.available_bytes()};
}

std::string bus_address(int device_index) {
  std::array<char, 32> address{};
  TESSERA_CUDA_CALL(cudaDeviceGetPCIBusId, address.data(), static_cast<int>(address.size()),
                    device_index);
  return address.data();
}

}  // namespace

CudaMemory::CudaMemory(int device_index, std::string device_name, std::size_t total_bytes,
                       Ledger* ledger)
    : device_index_(device_index),
      device_name_(std::move(device_name)),
      total_bytes_(total_bytes),
      numa_node_(numa_node_of(bus_address(device_index))),
      // Parts of one GPU (MIG) have its address, and sizes of their own.
      shared_id_(
          std::hash<std::string>()(detail::concat(bus_address(device_index), " ", total_bytes))),
      ledger_(ledger) {}

Memory CudaMemory::allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) {
  check_alignment(alignment);
  if (bytes == 0) {
    return Memory();
  }
  if (tier == Tier::kHost) {
    HostMemoryRequest request;
    request.bytes = bytes;
    request.alignment = alignment;
    request.role = role;
    request.ledger = ledger_;
    return allocate_host_memory(request);
  }
  return tier == Tier::kPinned ? allocate_pinned(bytes, role, alignment)
                               : allocate_device(bytes, role, alignment);
}

MemoryInfo CudaMemory::info() const {
  const CudaDeviceScope scope(device_index_);
  MemoryInfo info;
  TESSERA_CUDA_CALL(cudaMemGetInfo, &info.free_bytes, &info.total_bytes);
  info.shared_id = shared_id_;
  return info;
}

PinStats CudaMemory::pin_stats() const {
  const std::lock_guard lock(mutex_);
  return pin_stats_;
}

std::string CudaMemory::shortage(Tier tier, std::size_t asked_bytes,
                                 const MemoryInfo& memory) const {
  if (ledger_ != nullptr) {
    return memory_report(*ledger_, tier, asked_bytes, memory.free_bytes, memory.total_bytes);
  }
  return detail::concat("asked for ", asked_bytes, " bytes (", approximate_bytes(asked_bytes),
                        ") of ", to_string(tier), " memory, ", memory.free_bytes, " of ",
                        memory.total_bytes, " are free");
}

Memory CudaMemory::allocate_pinned(std::size_t bytes, Role role, std::size_t alignment) {
  // The kernel promises more than it has and ends the process at the first touch; what can never
  // fit is refused here, where a message is still possible.
  const MemoryInfo host = host_memory_info();
  TESSERA_CHECK(host.total_bytes == 0 || bytes <= host.total_bytes, DeviceError,
                "pinned memory: ", shortage(Tier::kPinned, bytes, host));
  const CudaDeviceScope scope(device_index_);
  const SteadyClock clock;
  const std::int64_t start_ns = clock.now_ns();
  const bool is_huge = bytes >= kHugePageBytes;
  const HostPages pages =
      map_pages(bytes, is_huge ? std::max(alignment, kHugePageBytes) : alignment, Tier::kPinned);
  cudaError_t code = cudaSuccess;
  try {
    prefer_huge_pages(pages.data, pages.bytes);
    if (numa_node_) {
      prefer_node(pages, *numa_node_);
    }
    touch_pages(pages);
    code = cudaHostRegister(pages.data, pages.bytes, cudaHostRegisterPortable);
  } catch (...) {
    unmap_pages(pages);
    throw;
  }
  if (code != cudaSuccess) {
    unmap_pages(pages);
    cudaGetLastError();
    throw DeviceError(
        detail::concat("pinned memory: ", cuda_error_message("cudaHostRegister", code), "\n",
                       shortage(Tier::kPinned, bytes, host_memory_info())));
  }
  {
    const std::lock_guard lock(mutex_);
    pin_stats_.seconds += static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
    pin_stats_.bytes += pages.bytes;
  }
  return charged(Tier::kPinned, pages.data, bytes, pages.bytes, role, [pages] {
    cudaHostUnregister(pages.data);  // fails only when the driver has shut down
    unmap_pages(pages);
  });
}

Memory CudaMemory::allocate_device(std::size_t bytes, Role role, std::size_t alignment) {
  const CudaDeviceScope scope(device_index_);
  const std::size_t spare = alignment > kCudaAlignment ? alignment - kCudaAlignment : 0;
  const bool is_shared = role == Role::kShard || role == Role::kGradient;
  const auto heap = is_shared ? CudaSharedHeap::current(device_index_) : nullptr;
  // What can never fit, or does not now, is reported below.
  if (std::byte* const data = heap != nullptr && bytes <= total_bytes_ && alignment <= total_bytes_
                                  ? heap->allocate(bytes, alignment)
                                  : nullptr;
      data != nullptr) {
    return charged(Tier::kDevice, data, bytes, bytes + spare, role,
                   [heap, data] { heap->free(data); });
  }
  void* start = nullptr;
  // What can never fit is not even asked for: tools that watch CUDA's calls would report it.
  const bool is_hopeless = bytes > total_bytes_ || spare > total_bytes_ - bytes;
  const cudaError_t code =
      is_hopeless ? cudaErrorMemoryAllocation : cudaMalloc(&start, bytes + spare);
  if (code != cudaSuccess) {
    cudaGetLastError();
    MemoryInfo memory;
    cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes);
    throw DeviceError(detail::concat(device_name_, ": ", cuda_error_message("cudaMalloc", code),
                                     "\n", shortage(Tier::kDevice, bytes, memory)));
  }
  const std::size_t skip =
      (alignment - reinterpret_cast<std::uintptr_t>(start) % alignment) % alignment;
  return charged(Tier::kDevice, static_cast<std::byte*>(start) + skip, bytes, bytes + spare, role,
                 [start, index = device_index_] {
                   int former = index;
                   cudaGetDevice(&former);
                   cudaSetDevice(index);
                   cudaFree(start);  // fails only when the driver has shut down
                   cudaSetDevice(former);
                 });
}

Memory CudaMemory::charged(Tier tier, void* data, std::size_t bytes, std::size_t taken_bytes,
                           Role role, std::function<void()> give_back) {
  Ledger* const ledger = ledger_;
  if (ledger != nullptr) {
    ledger->charge(tier, role, taken_bytes);
  }
  return Memory(data, bytes, [=, give_back = std::move(give_back)] {
    give_back();
    if (ledger != nullptr) {
      ledger->discharge(tier, role, taken_bytes);
    }
  });
}

}  // namespace tessera::device
