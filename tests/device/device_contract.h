// What the tests of every Device share: which devices there are here, and bytes that go up and come
// down by copies, since the host must not touch a GPU's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"

namespace tessera::device {

using Bytes = std::vector<std::uint8_t>;

struct DeviceCase {
  std::string name;
  std::function<std::unique_ptr<Device>(Ledger*)> make;
  std::string why_not;  // empty if it can run here
  bool is_discrete = false;

  friend void PrintTo(const DeviceCase& device, std::ostream* out) { *out << device.name; }
};

// cpu, late with several seeds, late and lazy, the same with memory of its own, cuda, cuda with its
// work timed.
std::vector<DeviceCase> all_devices();

inline constexpr Tier kAllKinds[] = {Tier::kDevice, Tier::kHost, Tier::kPinned};
inline constexpr StreamKind kAllStreams[] = {StreamKind::kCompute, StreamKind::kGather,
                                             StreamKind::kRead,    StreamKind::kWrite,
                                             StreamKind::kReduce,  StreamKind::kComm};

class DeviceContract : public ::testing::TestWithParam<DeviceCase> {
 protected:
  void SetUp() override {
    if (!GetParam().why_not.empty()) {
      GTEST_SKIP() << GetParam().why_not;
    }
    device_ = GetParam().make(&ledger_);
  }

  Stream& stream(StreamKind kind) { return device_->stream(kind); }

  Memory upload(Tier tier, const Bytes& bytes) {
    Memory memory = device_->allocate(tier, bytes.size(), Role::kOther);
    device_->start_copy(memory.data(), bytes.data(), bytes.size(), stream(StreamKind::kCompute))
        .wait();
    return memory;
  }

  // REQUIRES: whatever writes there is done.
  Bytes download(const void* data, std::size_t bytes) {
    Bytes result(bytes);
    device_->start_copy(result.data(), data, bytes, stream(StreamKind::kCompute)).wait();
    return result;
  }

  Ledger ledger_;
  std::unique_ptr<Device> device_;
};

// Bytes that differ from their neighbours and between seeds.
inline Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes result(bytes);
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::uint8_t& byte : result) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  return result;
}

}  // namespace tessera::device
