// Shards in memory of the host come to the device when their update is done, in the order of calls.
#include "tessera/coordinator/shard_loader.h"

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/mock_device.h"
#include "tests/support/no_tensor.h"

namespace tessera::coordinator {
namespace {

using support::NoTensor;

class HostLoaderTest : public ::testing::Test {
 protected:
  HostLoaderTest() {
    device::MockDeviceOptions options;
    options.mode = device::LateMode::kRandom;
    options.own_memory = true;
    device_ = device::make_mock_device(options);
    params_ = std::make_unique<shard::ParamTable>(0, 1, *device_);
  }

  shard::Param& add(const std::string& name, std::uint8_t value) {
    shard::ParamSpec spec;
    spec.name = name;
    spec.numel = 1000;
    spec.placement.parameter = Tier::kHost;
    shard::Param& param = params_->add(spec, std::make_unique<NoTensor>());
    std::memset(param.shard(), value, param.layout().shard_bytes());
    return param;
  }
  device::Pending ready() { return device_->stream(device::StreamKind::kGather).record(); }
  device::Memory place() { return device_->allocate(Tier::kDevice, 4096, Role::kFull); }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<shard::ParamTable> params_;
};

TEST_F(HostLoaderTest, BringsAShardWhoseUpdateIsDone) {
  ShardLoader loader(*params_, *device_);
  const shard::Param& param = add("p", 3);
  const device::Memory to = place();
  loader.start_load(param, to.data(), ready()).wait();
  EXPECT_EQ(std::memcmp(to.data(), param.shard(), param.layout().shard_bytes()), 0);
  EXPECT_EQ(loader.take_stats(Tier::kHost).loaded_bytes, param.layout().shard_bytes());
  EXPECT_EQ(loader.take_stats(Tier::kHost).loaded_bytes, 0U);
}

TEST_F(HostLoaderTest, StartsNoCopyBeforeTheUpdateAndNoneAheadOfAnEarlierCall) {
  ShardLoader loader(*params_, *device_);
  shard::Param& first = add("first", 1);
  const shard::Param& second = add("second", 2);
  const device::Memory to = place();
  const device::Memory other = place();
  const auto update = std::make_shared<device::Completion>();
  first.set_updated(device::Pending(update));
  const device::Pending brought = loader.start_load(first, to.data(), ready());
  const device::Pending behind = loader.start_load(second, other.data(), ready());
  EXPECT_FALSE(brought.done());
  EXPECT_FALSE(behind.done());
  std::memset(first.shard(), 7, first.layout().shard_bytes());  // what the update makes
  update->succeed();
  brought.wait();
  behind.wait();
  EXPECT_EQ(std::memcmp(to.data(), first.shard(), first.layout().shard_bytes()), 0);
  EXPECT_EQ(std::memcmp(other.data(), second.shard(), second.layout().shard_bytes()), 0);
  loader.wait_idle();
}

TEST_F(HostLoaderTest, PassesTheFailureOfAnUpdateOnAndGoesOnWithTheNext) {
  ShardLoader loader(*params_, *device_);
  shard::Param& first = add("first", 1);
  const shard::Param& second = add("second", 2);
  const device::Memory to = place();
  const device::Memory other = place();
  const auto update = std::make_shared<device::Completion>();
  first.set_updated(device::Pending(update));
  const device::Pending brought = loader.start_load(first, to.data(), ready());
  const device::Pending behind = loader.start_load(second, other.data(), ready());
  update->fail(std::make_exception_ptr(IoError("the disk is gone")));
  EXPECT_THROW(brought.wait(), IoError);
  EXPECT_THROW(std::ignore = brought.state()->wait_handed_over(), IoError);
  behind.wait();
  EXPECT_EQ(std::memcmp(other.data(), second.shard(), second.layout().shard_bytes()), 0);
}

class HostLoaderCopyTest : public HostLoaderTest {
 protected:
  // New values on the device, which its shard has not got yet.
  shard::DeviceCopy make_copy(std::uint8_t value) {
    copies_.push_back(place());
    device::Stream& update = device_->stream(device::StreamKind::kReduce);
    return {copies_.back().data(),
            device_->start_fill(copies_.back().data(), value, copies_.back().bytes(), update)};
  }
  static void expect_filled(const device::Memory& memory, const shard::Param& param,
                            std::uint8_t value) {
    const std::vector<std::uint8_t> expected(
        static_cast<std::size_t>(param.range().numel) * sizeof(float), value);
    EXPECT_EQ(std::memcmp(memory.data(), expected.data(), expected.size()), 0);
  }

  std::vector<device::Memory> copies_;
};

TEST_F(HostLoaderCopyTest, TakesWhatTheDeviceStillHasFromThere) {
  ShardLoader loader(*params_, *device_);
  shard::Param& param = add("p", 3);
  param.set_updated(device::Pending(std::make_shared<device::Completion>()));  // never comes home
  param.set_device_copy(make_copy(9));
  const device::Memory to = place();
  loader.start_load(param, to.data(), ready()).wait();
  expect_filled(to, param, 9);
  EXPECT_EQ(loader.take_stats(Tier::kHost).loaded_bytes, 0U);
}

TEST_F(HostLoaderCopyTest, WaitsUntilTheUpdateIsHandedOver) {
  ShardLoader loader(*params_, *device_);
  shard::Param& param = add("p", 3);
  const auto made = std::make_shared<device::HandedOver>();
  shard::DeviceCopy copy = make_copy(9);
  const device::Pending filled = copy.made;
  copy.made = device::Pending(made);
  param.set_device_copy(copy);
  const device::Memory to = place();
  const device::Pending brought = loader.start_load(param, to.data(), ready());
  EXPECT_FALSE(brought.done());
  made->hand_over(filled);
  brought.wait();
  expect_filled(to, param, 9);
}

TEST_F(HostLoaderCopyTest, PassesTheFailureOfItsMakerOn) {
  ShardLoader loader(*params_, *device_);
  shard::Param& param = add("p", 3);
  const shard::Param& second = add("second", 2);
  const auto made = std::make_shared<device::HandedOver>();
  param.set_device_copy({place().data(), device::Pending(made)});
  const device::Memory to = place();
  const device::Memory other = place();
  const device::Pending brought = loader.start_load(param, to.data(), ready());
  const device::Pending behind = loader.start_load(second, other.data(), ready());
  made->fail(std::make_exception_ptr(IoError("the disk is gone")));
  EXPECT_THROW(brought.wait(), IoError);
  behind.wait();  // the gather stream has not failed
  device_->stream(device::StreamKind::kGather).synchronize();
}

TEST_F(HostLoaderCopyTest, BringsTheShardWhereTheCopyWasForgottenBeforeItsTurn) {
  ShardLoader loader(*params_, *device_);
  shard::Param& first = add("first", 1);
  shard::Param& second = add("second", 2);
  const auto update = std::make_shared<device::Completion>();
  first.set_updated(device::Pending(update));  // holds the queue up
  second.set_device_copy(make_copy(9));
  const device::Memory to = place();
  const device::Memory other = place();
  const device::Pending brought = loader.start_load(first, to.data(), ready());
  const device::Pending behind = loader.start_load(second, other.data(), ready());
  loader.forget_device_copies();
  device_->stream(device::StreamKind::kReduce).synchronize();
  copies_.clear();
  update->succeed();
  brought.wait();
  behind.wait();
  expect_filled(other, second, 2);
  EXPECT_EQ(loader.take_stats(Tier::kHost).loaded_bytes, 2 * second.layout().shard_bytes());
}

TEST_F(HostLoaderCopyTest, IsReadBeforeTheReduceStreamGoesOn) {
  ShardLoader loader(*params_, *device_);
  shard::Param& param = add("p", 9);  // as its home has it by then
  for (int round = 0; round < 20; ++round) {
    param.set_device_copy(make_copy(9));
    const device::Memory to = place();
    const device::Pending brought = loader.start_load(param, to.data(), ready());
    loader.forget_device_copies();
    // Whoever gets the memory next writes to it behind the reduce stream.
    const device::Memory& copy = copies_.back();
    device_->start_fill(copy.data(), 77, copy.bytes(), device_->stream(device::StreamKind::kReduce))
        .wait();
    brought.wait();
    expect_filled(to, param, 9);
  }
}

}  // namespace
}  // namespace tessera::coordinator
