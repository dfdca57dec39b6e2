// The arena on devices that are late: reuse of bytes is ordered, or poison shows.
#include "tessera/device/arena.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/mock_device.h"
#include "tests/device/device_support.h"
#include "tests/support/sizes.h"

namespace tessera::device {
namespace {

constexpr std::size_t kUnit = kArenaAlignment;

class ArenaOnALazyDevice : public ::testing::Test {
 protected:
  Ledger ledger_;
  std::unique_ptr<Device> device_ = [this] {
    MockDeviceOptions options;
    options.host.ledger = &ledger_;
    return make_mock_device(options);
  }();
  Stream& gather_ = device_->stream(StreamKind::kGather);
  Stream& read_ = device_->stream(StreamKind::kRead);
  Stream& write_ = device_->stream(StreamKind::kWrite);
};

TEST_F(ArenaOnALazyDevice, TakesOneRegionAndChargesIt) {
  {
    Arena arena(*device_, 100 * kUnit);
    const std::size_t charged = ledger_.current_bytes(Tier::kDevice, Role::kFull);
    EXPECT_GE(charged, 100 * kUnit);
    ArenaBlock block = arena.allocate(10 * kUnit - 3, gather_);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data) % kUnit, 0U);
    EXPECT_EQ(block.bytes, 10 * kUnit - 3);
    EXPECT_EQ(ledger_.current_bytes(Tier::kDevice, Role::kFull), charged);
    EXPECT_EQ(arena.stats().region.used_bytes, 10 * kUnit);
    arena.release(std::move(block), Pending());
    EXPECT_EQ(arena.stats().region.used_bytes, 0U);
  }
  EXPECT_EQ(ledger_.current_bytes(Tier::kDevice), 0U);
}

// What a layer reads must survive until it has been read, also when its block goes back first.
TEST_F(ArenaOnALazyDevice, DoesNotOverwriteBytesThatAreStillRead) {
  Arena arena(*device_, kUnit);
  std::vector<std::byte> seen(kUnit);
  ArenaBlock first = arena.allocate(kUnit, gather_);
  const Pending filled = device_->start_fill(first.data, 1, kUnit, gather_);
  write_.wait(filled);
  const Pending copied = device_->start_copy(seen.data(), first.data, kUnit, write_);
  std::byte* const data = first.data;
  arena.release(std::move(first), copied);

  ArenaBlock second = arena.allocate(kUnit, read_);
  ASSERT_EQ(second.data, data);
  EXPECT_FALSE(copied.done()) << "the host must not have waited";
  const Pending overwritten = device_->start_fill(second.data, 2, kUnit, read_);
  overwritten.wait();
  copied.wait();
  EXPECT_TRUE(holds(seen.data(), kUnit, 1));
  EXPECT_TRUE(holds(second.data, kUnit, 2));
  arena.release(std::move(second), overwritten);
}

TEST_F(ArenaOnALazyDevice, WaitsForEveryFormerUserOfABlockOverSeveral) {
  Arena arena(*device_, 4 * kUnit);
  std::vector<Pending> uses;
  int num_done = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    ArenaBlock block = arena.allocate_at(i * kUnit, kUnit, gather_);
    uses.push_back(gather_.enqueue([&num_done] { ++num_done; }));
    arena.release(std::move(block), uses.back());
  }
  ArenaBlock middle = arena.allocate_at(kUnit, 2 * kUnit, read_);
  read_.synchronize();
  EXPECT_EQ(num_done, 3);  // those before it on the same stream, and not the last
  EXPECT_FALSE(uses[3].done());
  arena.release(std::move(middle), Pending());
  // The parts beside it kept their fences.
  ArenaBlock end = arena.allocate_at(3 * kUnit, kUnit, write_);
  write_.synchronize();
  EXPECT_EQ(num_done, 4);
  arena.release(std::move(end), Pending());
}

TEST_F(ArenaOnALazyDevice, KeepsTheFencesOfABlockThatIsSplit) {
  Arena arena(*device_, 3 * kUnit);
  ArenaBlock whole = arena.allocate(3 * kUnit, gather_);
  const Pending used = gather_.enqueue([] {});
  arena.release(std::move(whole), used);
  ArenaBlock middle = arena.allocate_at(kUnit, kUnit, device_->stream(StreamKind::kReduce));
  for (const std::size_t offset : {std::size_t{0}, 2 * kUnit}) {
    ArenaBlock side = arena.allocate_at(offset, kUnit, read_);
    EXPECT_FALSE(side.ready.done()) << offset;
    EXPECT_FALSE(used.done());
    arena.release(std::move(side), Pending());
  }
  arena.release(std::move(middle), Pending());
}

// Taken on one stream and given back unused: the next stream must wait for the user before that.
TEST_F(ArenaOnALazyDevice, RemembersFormerUsersOfABlockThatWasNeverUsed) {
  Arena arena(*device_, kUnit);
  bool is_used = false;
  ArenaBlock first = arena.allocate(kUnit, gather_);
  arena.release(std::move(first), gather_.enqueue([&is_used] { is_used = true; }));
  ArenaBlock unused = arena.allocate(kUnit, read_);
  arena.release(std::move(unused), Pending());
  ArenaBlock third = arena.allocate(kUnit, write_);
  bool was_used = false;
  write_.enqueue([&] { was_used = is_used; }).wait();
  EXPECT_TRUE(was_used);
  arena.release(std::move(third), Pending());
}

TEST_F(ArenaOnALazyDevice, CountsWhatDoesNotFit) {
  Arena arena(*device_, 2 * kUnit);
  ArenaBlock inside = arena.allocate(kUnit, gather_);
  ArenaBlock outside = arena.allocate(2 * kUnit, gather_);
  EXPECT_FALSE(inside.is_overflow);
  EXPECT_TRUE(outside.is_overflow);
  EXPECT_EQ(arena.stats().num_overflows, 1U);
  EXPECT_EQ(arena.stats().overflow_bytes, 2 * kUnit);
  const std::size_t charged = ledger_.current_bytes(Tier::kDevice, Role::kFull);

  // Memory that is still used is neither given back nor forgotten.
  const Pending used = device_->start_fill(outside.data, 3, outside.bytes, gather_);
  arena.release(std::move(outside), used);
  EXPECT_EQ(arena.stats().overflow_bytes, 2 * kUnit);
  EXPECT_EQ(ledger_.current_bytes(Tier::kDevice, Role::kFull), charged);
  used.wait();
  arena.release(std::move(inside), Pending());
  ArenaBlock next = arena.allocate(kUnit, gather_);
  EXPECT_EQ(arena.stats().overflow_bytes, 0U);
  EXPECT_EQ(arena.stats().peak_overflow_bytes, 2 * kUnit);
  EXPECT_LT(ledger_.current_bytes(Tier::kDevice, Role::kFull), charged);
  arena.release(std::move(next), Pending());
  arena.reset_peaks();
  EXPECT_EQ(arena.stats().peak_overflow_bytes, 0U);
}

TEST_F(ArenaOnALazyDevice, HandsOutBlocksOfZeroBytes) {
  Arena arena(*device_, kUnit);
  ArenaBlock full = arena.allocate(kUnit, gather_);
  ArenaBlock empty = arena.allocate(0, gather_);
  ArenaBlock planned = arena.allocate_at(0, 0, gather_);
  EXPECT_EQ(empty.data, nullptr);
  EXPECT_FALSE(empty.is_overflow);
  arena.release(std::move(empty), gather_.record());
  arena.release(std::move(planned), gather_.enqueue([] {}));
  arena.release(std::move(full), Pending());
  EXPECT_EQ(arena.stats().num_overflows, 0U);
}

TEST_F(ArenaOnALazyDevice, OfZeroBytesOverflowsAlways) {
  Arena arena(*device_, 0);
  ArenaBlock block = arena.allocate(10, gather_);
  EXPECT_TRUE(block.is_overflow);
  arena.release(std::move(block), Pending());
  EXPECT_EQ(arena.stats().overflow_bytes, 0U);
}

TEST_F(ArenaOnALazyDevice, RefusesPlannedOffsetsThatAreTaken) {
  Arena arena(*device_, 4 * kUnit);
  ArenaBlock block = arena.allocate_at(kUnit, kUnit, gather_);
  EXPECT_FALSE(arena.can_allocate_at(0, 2 * kUnit));
  EXPECT_THROW((void)arena.allocate_at(0, 2 * kUnit, gather_), InternalError);
  EXPECT_TRUE(arena.can_allocate_at(2 * kUnit, 2 * kUnit));
  arena.release(std::move(block), Pending());
}

TEST_F(ArenaOnALazyDevice, RefusesABlockThatWasGivenBack) {
  Arena arena(*device_, kUnit);
  const ArenaBlock inside = arena.allocate(kUnit, gather_);
  const ArenaBlock outside = arena.allocate(kUnit, gather_);
  arena.release(inside, Pending());
  arena.release(outside, Pending());
  EXPECT_THROW(arena.release(inside, Pending()), InternalError);
  EXPECT_THROW(arena.release(outside, Pending()), InternalError);
}

TEST_F(ArenaOnALazyDevice, PassesAFailureOnToTheNextUserOfTheBytes) {
  Arena arena(*device_, kUnit);
  ArenaBlock block = arena.allocate(kUnit, gather_);
  arena.release(std::move(block), gather_.enqueue([] { throw IoError("disk 2"); }));
  ArenaBlock next = arena.allocate(kUnit, read_);
  EXPECT_THROW(read_.synchronize(), IoError);
  arena.release(std::move(next), Pending());
}

TEST_F(ArenaOnALazyDevice, WaitsForReleasedWorkBeforeItsMemoryGoes) {
  std::vector<std::byte> seen(kUnit);
  {
    Arena arena(*device_, kUnit);
    ArenaBlock inside = arena.allocate(kUnit, gather_);
    ArenaBlock outside = arena.allocate(kUnit, gather_);
    (void)device_->start_fill(inside.data, 6, kUnit, gather_);
    (void)device_->start_fill(outside.data, 7, kUnit, gather_);
    arena.release(std::move(outside), gather_.record());
    Pending copied = device_->start_copy(seen.data(), inside.data, kUnit, gather_);
    arena.release(std::move(inside), std::move(copied));
  }
  EXPECT_TRUE(holds(seen.data(), kUnit, 6));
}

// Layers are gathered on one stream, read on another and given back at once, in random sizes and
// orders. Every byte that a reader gets must be that of its own layer.
int count_wrong_layers(Device& device, std::uint32_t seed) {
  constexpr std::size_t kMostBytes = 6 * kUnit;
  constexpr int kNumLayers = 300;
  std::mt19937 random(seed);
  std::vector<std::vector<std::byte>> seen(kNumLayers);
  struct Live {
    ArenaBlock block;
    Pending last_use;
  };
  std::vector<Live> live;
  Arena arena(device, 16 * kUnit);
  const auto release_one = [&] {
    const std::size_t i = random() % live.size();
    arena.release(std::move(live[i].block), std::move(live[i].last_use));
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
  };
  const StreamKind writers[] = {StreamKind::kGather, StreamKind::kReduce};
  const StreamKind readers[] = {StreamKind::kRead, StreamKind::kWrite, StreamKind::kCompute};
  for (int layer = 0; layer < kNumLayers; ++layer) {
    Stream& writer = device.stream(writers[random() % 2]);
    Stream& reader = device.stream(readers[random() % (layer % 10 == 0 ? 3 : 2)]);
    const std::size_t bytes = random() % kMostBytes;
    const std::size_t planned = random() % 10 * kUnit;
    ArenaBlock block = random() % 2 == 0 && arena.can_allocate_at(planned, bytes)
                           ? arena.allocate_at(planned, bytes, writer)
                           : arena.allocate(bytes, writer);
    seen[static_cast<std::size_t>(layer)].resize(bytes);
    reader.wait(
        device.start_fill(block.data, static_cast<std::uint8_t>(layer % 251), bytes, writer));
    Pending used =
        device.start_copy(seen[static_cast<std::size_t>(layer)].data(), block.data, bytes, reader);
    live.push_back({std::move(block), std::move(used)});
    while (live.size() > 4 || (!live.empty() && random() % 3 == 0)) {
      release_one();
    }
  }
  while (!live.empty()) {
    release_one();
  }
  for (std::size_t i = 0; i < kNumStreams; ++i) {
    device.stream(static_cast<StreamKind>(i)).synchronize();
  }
  int num_wrong = 0;
  for (int layer = 0; layer < kNumLayers; ++layer) {
    const auto& bytes = seen[static_cast<std::size_t>(layer)];
    num_wrong += holds(bytes.data(), bytes.size(), static_cast<std::uint8_t>(layer % 251)) ? 0 : 1;
  }
  return num_wrong;
}

TEST(Arena, NeverMixesLayersUpOnAnyDevice) {
  for (std::uint32_t seed = 1; seed <= support::rounds(5U, 2U); ++seed) {
    EXPECT_EQ(count_wrong_layers(*make_cpu_device(), seed), 0) << "cpu, seed " << seed;
    EXPECT_EQ(count_wrong_layers(*make_mock_device(), seed), 0) << "lazy, seed " << seed;
    MockDeviceOptions options;
    options.mode = LateMode::kRandom;
    options.seed = seed;
    EXPECT_EQ(count_wrong_layers(*make_mock_device(options), seed), 0) << "random, seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::device
