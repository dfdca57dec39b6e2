// A device that counts how many copies on its read stream are under way at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/device/device.h"

namespace tessera::optim {

class CopyCounter final : public device::Device {
 public:
  explicit CopyCounter(std::unique_ptr<device::Device> inner) : inner_(std::move(inner)) {}

  std::size_t most_copies_up() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }

  std::string name() const override { return inner_->name(); }
  device::Stream& stream(device::StreamKind kind) override { return inner_->stream(kind); }
  bool is_discrete() const override { return inner_->is_discrete(); }
  device::Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return inner_->allocate(tier, bytes, role, alignment);
  }
  device::Pending start_copy(void* to, const void* from, std::size_t bytes,
                             device::Stream& stream) override {
    device::Pending copy = inner_->start_copy(to, from, bytes, stream);
    if (stream.kind() == device::StreamKind::kRead) {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(under_way_, [](const device::Pending& each) { return each.done(); });
      under_way_.push_back(copy);
      most_ = std::max(most_, under_way_.size());
    }
    return copy;
  }
  device::Pending start_fill(void* to, std::uint8_t value, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_fill(to, value, bytes, stream);
  }
  device::MemoryInfo memory_info() const override { return inner_->memory_info(); }

 private:
  const std::unique_ptr<device::Device> inner_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<device::Pending> under_way_;
  std::size_t most_ = 0;
};

}  // namespace tessera::optim
