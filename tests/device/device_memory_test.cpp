// The promises of device.h about memory, kept by every Device.
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/device/device_contract.h"

namespace tessera::device {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;

TEST_P(DeviceContract, SaysWhetherItsMemoryIsItsOwn) {
  EXPECT_EQ(device_->is_discrete(), GetParam().is_discrete);
  for (const Tier tier : kAllKinds) {  // charged to the tier it stands for, on every device
    const Memory memory = device_->allocate(tier, 4096, Role::kShard);
    EXPECT_EQ(ledger_.current_bytes(tier, Role::kShard), 4096U) << to_string(tier);
    EXPECT_EQ(ledger_.current_bytes(tier), 4096U) << to_string(tier);
  }
}

TEST_P(DeviceContract, AlignsMemoryAsAsked) {
  for (const Tier tier : kAllKinds) {
    for (const std::size_t alignment :
         {std::size_t{16}, std::size_t{256}, std::size_t{4096}, kMib}) {
      for (const std::size_t bytes : {std::size_t{1}, std::size_t{70'001}}) {
        const Memory memory = device_->allocate(tier, bytes, Role::kOther, alignment);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % alignment, 0U)
            << to_string(tier) << " " << alignment;
        EXPECT_EQ(memory.bytes(), bytes);
      }
    }
    EXPECT_THROW((void)device_->allocate(tier, 1, Role::kOther, 24), InternalError);
  }
}

TEST_P(DeviceContract, ChargesTheLedgerWhileMemoryLives) {
  for (const Tier tier : kAllKinds) {
    {
      const Memory memory = device_->allocate(tier, 100'000, Role::kOptimizer);
      const Memory nothing = device_->allocate(tier, 0, Role::kOptimizer);
      EXPECT_EQ(nothing.data(), nullptr);
      EXPECT_GE(ledger_.current_bytes(tier, Role::kOptimizer), 100'000U);
      EXPECT_LT(ledger_.current_bytes(tier, Role::kOptimizer), 100'000U + 65'536U);
      EXPECT_EQ(ledger_.current_bytes(tier), ledger_.current_bytes(tier, Role::kOptimizer));
    }
    EXPECT_EQ(ledger_.current_bytes(tier), 0U) << to_string(tier);
    ledger_.reset_peaks();
  }
}

TEST_P(DeviceContract, SaysWhatWasAskedForWhenMemoryIsNotEnough) {
  const std::size_t bytes = SIZE_MAX / 4;
  for (const Tier tier : kAllKinds) {
    try {
      (void)device_->allocate(tier, bytes, Role::kOther);
      ADD_FAILURE() << "expected DeviceError for " << to_string(tier);
    } catch (const DeviceError& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(ledger_.current_bytes(tier), 0U);
  }
  stream(StreamKind::kGather).enqueue([] {}).wait();  // the device is as good as before
}

TEST_P(DeviceContract, SaysWhoHoldsWhatAndWhatWouldFitWhenMemoryIsNotEnough) {
  const Memory shards = device_->allocate(Tier::kDevice, 4 * kMib, Role::kShard);
  const Memory states = device_->allocate(Tier::kPinned, 8 * kMib, Role::kOptimizer);
  const std::string place = GetParam().is_discrete ? "host" : "nvme";
  try {
    (void)device_->allocate(Tier::kDevice, SIZE_MAX / 4, Role::kFull);
    ADD_FAILURE() << "expected DeviceError";
  } catch (const DeviceError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(ledger_.table()), std::string::npos) << message;
    EXPECT_NE(message.find("place.parameters=" + place + ": gives 4194304 B"), std::string::npos)
        << message;
    // Pinned memory is the host's: where the device has its own, it gives nothing there.
    EXPECT_EQ(message.find("place.optimizer=") == std::string::npos, GetParam().is_discrete)
        << message;
  }
}

TEST_P(DeviceContract, CountsWhatPinningCosts) {
  EXPECT_EQ(device_->pin_stats().bytes, 0U);
  const Memory device = device_->allocate(Tier::kDevice, kMib, Role::kOther);
  const Memory host = device_->allocate(Tier::kHost, kMib, Role::kOther);
  EXPECT_EQ(device_->pin_stats().bytes, 0U) << "only pinned memory is pinned";
  device_->allocate(Tier::kPinned, 130 * kMib, Role::kOther).reset();  // touched in pieces
  const Memory pinned = device_->allocate(Tier::kPinned, 3 * kMib, Role::kOther);
  const PinStats stats = device_->pin_stats();
  if (!device_->name().starts_with("cuda")) {  // a processor needs nothing to be made known to it
    EXPECT_EQ(stats.bytes, 0U);
    EXPECT_EQ(stats.seconds, 0.0);
    return;
  }
  EXPECT_EQ(stats.bytes, 133 * kMib);
  EXPECT_GT(stats.seconds, 0.0);
}

TEST_P(DeviceContract, KnowsHowMuchMemoryThereIs) {
  const MemoryInfo info = device_->memory_info();
  EXPECT_GT(info.free_bytes, 0U);
  EXPECT_LE(info.free_bytes, info.total_bytes);
}

}  // namespace
}  // namespace tessera::device
