// A device whose memory is charged as host memory: for shards that shall live there. Only for
// devices whose memory is the host's own, so that nothing has to be copied.
//
// Threads: as the device beneath.
#pragma once

#include <string>

#include "tessera/device/device.h"

namespace tessera::engine {

class HostTierDevice final : public device::Device {
 public:
  explicit HostTierDevice(device::Device& device) : device_(device) {}

  std::string name() const override { return device_.name(); }
  device::Stream& stream(device::StreamKind kind) override { return device_.stream(kind); }
  device::Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return device_.allocate(tier == Tier::kDevice ? Tier::kHost : tier, bytes, role, alignment);
  }
  device::Pending start_copy(void* to, const void* from, std::size_t bytes,
                             device::Stream& stream) override {
    return device_.start_copy(to, from, bytes, stream);
  }
  device::Pending start_fill(void* to, std::uint8_t value, std::size_t bytes,
                             device::Stream& stream) override {
    return device_.start_fill(to, value, bytes, stream);
  }
  device::MemoryInfo memory_info() const override { return device_.memory_info(); }
  bool is_discrete() const override { return device_.is_discrete(); }
  device::PinStats pin_stats() const override { return device_.pin_stats(); }
  void collect_spans() override { device_.collect_spans(); }

 private:
  device::Device& device_;
};

}  // namespace tessera::engine
