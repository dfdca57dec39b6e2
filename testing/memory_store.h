// A store in memory: device or host. data() is what it holds; reads and writes are copies.
//
// Exact: it takes what has been allocated, or what was reserved if that is more. Beyond what was
// reserved each allocate() moves everything, with old and new held at once for that moment: reserve
// where the sum is known.
//
// Threads: as in store.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/tier/store.h"

namespace tessera::tier {

class MemoryStore final : public Store {
 public:
  // Charged under `role` of the tier of `tier`. `device` outlives it.
  MemoryStore(device::Device& device, Tier tier, Role role, std::size_t reserved_bytes = 0);

  Tier tier() const override { return tier_; }
  std::uint64_t allocate(std::size_t bytes, std::string name) override;
  std::uint64_t bytes() const override { return bytes_; }
  const std::vector<StoreExtent>& extents() const override { return extents_; }
  std::byte* data() override { return memory_.data(); }
  Pending start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) override;
  Pending start_write(std::uint64_t offset, const std::byte* from, std::size_t bytes) override;
  StoreStats stats() const override { return {read_bytes_.load(), written_bytes_.load()}; }

 private:
  void grow(std::size_t bytes);

  device::Device& device_;
  const Tier tier_;
  const Role role_;
  device::Memory memory_;
  std::size_t bytes_ = 0;  // of extents
  std::vector<StoreExtent> extents_;
  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> written_bytes_{0};
};

}  // namespace tessera::tier
