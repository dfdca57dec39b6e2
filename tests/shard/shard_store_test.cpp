// Where shards on NVMe are, and which of their writes are still under way.
#include "tessera/shard/shard_store.h"

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/held_store.h"
#include "tests/support/no_tensor.h"

namespace tessera::shard {
namespace {

using device::Pending;
using tessera::support::HeldStore;
using tessera::support::StoreCall;

using support::NoTensor;

class ShardStoreTest : public ::testing::Test {
 protected:
  const Param& add(std::int64_t numel, DType dtype = DType::kFloat32) {
    ParamSpec spec;
    spec.name = detail::concat("p", params_.num_params());
    spec.numel = numel;
    spec.dtype = dtype;
    spec.placement.parameter = Tier::kNvme;
    const Param& param = params_.add(spec, std::make_unique<NoTensor>());
    shards_.add(param);
    return param;
  }
  // Whole blocks, all bytes alike.
  device::Memory blocks(std::size_t bytes, int value) {
    device::Memory memory = device_->allocate(Tier::kHost, tier::whole_blocks(bytes),
                                              Role::kStaging, tier::kBlockBytes);
    std::memset(memory.data(), value, memory.bytes());
    return memory;
  }

  std::unique_ptr<device::Device> device_ = device::make_cpu_device({});
  ParamTable params_{0, 1, *device_};
  HeldStore store_{std::size_t{1} << 20};
  ShardStore shards_{store_};
};

TEST_F(ShardStoreTest, GivesEachShardBlocksOfItsOwnUnderItsName) {
  const Param& one = add(1);
  const Param& none = add(0);
  const Param& bf16 = add(kShardStep + 1, DType::kBFloat16);
  const Param& fp32 = add(kShardStep, DType::kFloat32);
  EXPECT_EQ(shards_.offset(one.id()), 0);
  EXPECT_EQ(shards_.offset(none.id()), 4096);
  EXPECT_EQ(shards_.offset(bf16.id()), 4096);
  EXPECT_EQ(shards_.offset(fp32.id()), 3 * 4096);
  EXPECT_EQ(store_.bytes(), 5U * 4096);
  ASSERT_EQ(store_.extents().size(), 4U);
  EXPECT_EQ(store_.extents()[2].name, "parameter 'p2'");
  EXPECT_EQ(&shards_.store(), &store_);
}

TEST_F(ShardStoreTest, KnowsWhichShardsItHas) {
  const Param& param = add(8);
  EXPECT_TRUE(shards_.has(param.id()));
  EXPECT_FALSE(shards_.has(7));
  EXPECT_THROW(shards_.add(param), InternalError);
  shards_.forget(param.id());
  EXPECT_FALSE(shards_.has(param.id()));
  const device::Memory memory = blocks(4096, 0);
  EXPECT_THROW(std::ignore = shards_.start_read(param, 0, 8, memory.data()), InternalError);
  shards_.add(param);
  EXPECT_EQ(shards_.offset(param.id()), 4096) << "its former room stays unused";
}

TEST_F(ShardStoreTest, ReadsBackWhatWasWrittenInAnyPieces) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Param& before = add(100, dtype);
    const Param& param = add(3 * kShardStep + 40, dtype);
    const Param& behind = add(100, dtype);
    const std::size_t element = bytes_of(dtype);
    const std::int64_t numel = param.layout().shard_numel();
    for (int piece = 0; piece < 4; ++piece) {
      const std::int64_t count = piece < 3 ? kShardStep : numel - 3 * kShardStep;
      const device::Memory from = blocks(static_cast<std::size_t>(count) * element, 10 + piece);
      shards_.start_write(param, piece * kShardStep, count, from.data()).wait();
    }
    const device::Memory to = blocks(param.layout().shard_bytes(), 0);
    shards_.start_read(param, 0, numel, to.data()).wait();
    for (std::int64_t i = 0; i < numel; ++i) {
      ASSERT_EQ(std::to_integer<int>(to.data()[static_cast<std::size_t>(i) * element]),
                10 + i / kShardStep)
          << i;
    }
    for (const Param* other : {&before, &behind}) {
      shards_.start_read(*other, 0, other->layout().shard_numel(), to.data()).wait();
      EXPECT_EQ(std::to_integer<int>(to.data()[0]), 0) << other->name() << " was written over";
    }
  }
}

TEST_F(ShardStoreTest, RefusesRangesThatAreNotItsPieces) {
  const Param& param = add(2 * kShardStep + 8);
  const device::Memory memory = blocks(4 * 4096 * 2, 0);
  const std::int64_t numel = param.layout().shard_numel();
  const auto read = [&](std::int64_t begin, std::int64_t count) {
    std::ignore = shards_.start_read(param, begin, count, memory.data());
  };
  EXPECT_NO_THROW(read(0, kShardStep));
  EXPECT_NO_THROW(read(kShardStep, numel - kShardStep));
  EXPECT_NO_THROW(read(2 * kShardStep, 8));
  EXPECT_NO_THROW(read(0, 0));
  EXPECT_THROW(read(-kShardStep, kShardStep), InternalError);
  EXPECT_THROW(read(8, kShardStep), InternalError) << "does not begin at a block";
  EXPECT_THROW(read(0, kShardStep - 8), InternalError) << "ends inside a block and not at the end";
  EXPECT_THROW(read(0, -1), InternalError);
  EXPECT_THROW(read(2 * kShardStep, 16), InternalError) << "behind the shard";
  EXPECT_THROW(std::ignore = shards_.start_write(param, 8, 8, memory.data()), InternalError);
  EXPECT_TRUE(shards_.is_written(param.id())) << "nothing was started";
}

TEST_F(ShardStoreTest, AShardIsWrittenWhenAllItsWritesAreDone) {
  const Param& param = add(2 * kShardStep);
  const Param& other = add(8);
  const device::Memory memory = blocks(2 * 8192, 1);
  EXPECT_TRUE(shards_.is_written(param.id()));
  shards_.wait_written(param.id());
  store_.hold(StoreCall::kWrite, "'p0'");
  const Pending first = shards_.start_write(param, 0, kShardStep, memory.data());
  const Pending second = shards_.start_write(param, kShardStep, kShardStep, memory.data());
  EXPECT_FALSE(shards_.is_written(param.id()));
  EXPECT_TRUE(shards_.is_written(other.id()));
  EXPECT_TRUE(store_.release_one());
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(shards_.is_written(param.id())) << "one of two";
  std::thread waiter([&] { shards_.wait_written(param.id()); });
  store_.release();
  waiter.join();
  EXPECT_TRUE(second.done());
  EXPECT_TRUE(shards_.is_written(param.id()));
}

TEST_F(ShardStoreTest, AShardIsReadOnceItIsWritten) {
  const Param& param = add(2 * kShardStep);
  const device::Memory written = blocks(2 * 8192, 7);
  const device::Memory found = blocks(8192, 1);
  store_.hold(StoreCall::kWrite, "'p0'");
  std::ignore = shards_.start_write(param, 0, 2 * kShardStep, written.data());
  std::thread releasing([&] { store_.release(); });
  start_read_shard(param, &shards_, kShardStep, kShardStep, found.data()).wait();
  releasing.join();
  EXPECT_EQ(std::memcmp(found.data(), written.data(), found.bytes()), 0);
}

TEST_F(ShardStoreTest, AWriteThatFailedIsToldToEverybodyWhoAsks) {
  const Param& param = add(8);
  const device::Memory memory = blocks(4096, 1);
  store_.fail(StoreCall::kWrite, "'p0'");
  const Pending failed = shards_.start_write(param, 0, 8, memory.data());
  EXPECT_THROW(failed.wait(), IoError);
  store_.clear_rules();
  shards_.start_write(param, 0, 8, memory.data()).wait();
  for (int asked = 0; asked < 2; ++asked) {
    EXPECT_FALSE(shards_.is_written(param.id()));
    try {
      shards_.wait_written(param.id());
      FAIL() << "nothing was thrown";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("'p0'"), std::string::npos) << error.what();
    }
  }
}

TEST_F(ShardStoreTest, ShardsAreWrittenAndAskedForFromManyThreads) {
  constexpr int kThreads = 4;
  for (int i = 0; i < kThreads; ++i) {
    add(kShardStep);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const device::Memory memory = blocks(8192, i + 1);
      for (int round = 0; round < 50; ++round) {
        std::ignore = shards_.start_write(params_[i], 0, kShardStep, memory.data());
        std::ignore = shards_.is_written((i + round) % kThreads);
        shards_.wait_written(i);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int i = 0; i < kThreads; ++i) {
    const auto* data = store_.bytes_at(static_cast<std::uint64_t>(shards_.offset(i)));
    EXPECT_EQ(std::to_integer<int>(data[100]), i + 1);
  }
}

}  // namespace
}  // namespace tessera::shard
