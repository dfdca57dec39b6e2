// The engine that other tests trust to fail: each of its faults does what it says, and no more.
#include "testing/fault_engine.h"

#include <fcntl.h>

#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/aligned_bytes.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

using tier::kBlockBytes;
using tier::Pending;

class FaultEngineTest : public ::testing::Test {
 protected:
  Pending start_write(std::uint64_t block, const AlignedBytes& from) {
    return engine_.start_write(*file_, block * kBlockBytes, from.data(), from.bytes(), "data");
  }
  Pending start_read(std::uint64_t block, AlignedBytes& to) {
    return engine_.start_read(*file_, block * kBlockBytes, to.data(), to.bytes(), "data");
  }
  static tier::IoOptions by_threads() {
    tier::IoOptions options;
    options.kind = tier::IoKind::kThreads;
    return options;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<tier::IoFile> file_ = tier::open_io_file((directory_.path() / "data").string(),
                                                           O_RDWR | O_CREAT, tier::DirectIo::kAuto);
  FaultEngine engine_{tier::make_io_engine(by_threads(), nullptr)};
  AlignedBytes data_ = AlignedBytes::pattern(4 * kBlockBytes, 1);
  AlignedBytes to_{4 * kBlockBytes};
};

TEST_F(FaultEngineTest, WithoutFaultsItIsTheEngineBelow) {
  start_write(0, data_).wait();
  start_read(0, to_).wait();
  EXPECT_TRUE(to_ == data_);
  EXPECT_EQ(engine_.name(), "threads");
  EXPECT_EQ(engine_.counts().num_reads, 1U);
  EXPECT_EQ(engine_.num_faults(), 0U);
  ASSERT_EQ(engine_.seen().size(), 2U);
  EXPECT_EQ(engine_.seen()[0].call, IoCall::kWrite);
  EXPECT_EQ(engine_.seen()[1].bytes, data_.bytes());
}

TEST_F(FaultEngineTest, OnlyTheNthOfItsKindFails) {
  engine_.set_nth(IoCall::kRead, 1, IoFault::kFail);
  start_write(0, data_).wait();
  start_write(4, data_).wait();
  EXPECT_NO_THROW(start_read(0, to_).wait());
  EXPECT_THROW(start_read(0, to_).wait(), IoError);
  EXPECT_NO_THROW(start_read(0, to_).wait());
  EXPECT_EQ(engine_.num_faults(), 1U);
}

TEST_F(FaultEngineTest, TheFirstThatTouchesAnOffsetFails) {
  engine_.set_at(IoCall::kWrite, 5 * kBlockBytes, IoFault::kFail, "data");
  EXPECT_NO_THROW(start_write(0, data_).wait());
  EXPECT_THROW(start_write(4, data_).wait(), IoError);
  EXPECT_NO_THROW(start_write(4, data_).wait());
}

TEST_F(FaultEngineTest, AShortReadBringsHalfAndFails) {
  start_write(0, data_).wait();
  engine_.set_nth(IoCall::kRead, 0, IoFault::kShort);
  EXPECT_THROW(start_read(0, to_).wait(), IoError);
  EXPECT_EQ(std::memcmp(to_.data(), data_.data(), 2 * kBlockBytes), 0);
  EXPECT_EQ(to_.data()[3 * kBlockBytes + 1], std::byte{0});
}

TEST_F(FaultEngineTest, ACorruptedWriteLeavesTheCallersMemoryAlone) {
  engine_.set_nth(IoCall::kWrite, 0, IoFault::kCorrupt);
  start_write(0, data_).wait();
  EXPECT_TRUE(data_ == AlignedBytes::pattern(4 * kBlockBytes, 1));
  start_read(0, to_).wait();
  EXPECT_FALSE(to_ == data_);
  to_.data()[2 * kBlockBytes] ^= std::byte{0x10};
  EXPECT_TRUE(to_ == data_);  // one bit, and that one
}

TEST_F(FaultEngineTest, ACorruptedReadLeavesTheFileAlone) {
  start_write(0, data_).wait();
  engine_.set_nth(IoCall::kRead, 0, IoFault::kCorrupt);
  start_read(0, to_).wait();
  EXPECT_FALSE(to_ == data_);
  start_read(0, to_).wait();
  EXPECT_TRUE(to_ == data_);
}

TEST_F(FaultEngineTest, WhatIsHeldIsNotBegunBeforeItsRelease) {
  start_write(0, data_).wait();
  engine_.set_nth(IoCall::kWrite, 1, IoFault::kHold);
  const AlignedBytes other = AlignedBytes::pattern(4 * kBlockBytes, 2);
  const Pending held = start_write(0, other);
  engine_.wait_until_held(1);
  start_read(0, to_).wait();
  EXPECT_TRUE(to_ == data_);
  EXPECT_FALSE(held.done());
  engine_.release();
  held.wait();
  EXPECT_EQ(engine_.num_held(), 0U);
  start_read(0, to_).wait();
  EXPECT_TRUE(to_ == other);
}

TEST_F(FaultEngineTest, WhatIsDelayedIsDoneOnlyAfterItsRelease) {
  start_write(0, data_).wait();
  engine_.set_nth(IoCall::kRead, 0, IoFault::kDelay);
  const Pending delayed = start_read(0, to_);
  AlignedBytes later(4 * kBlockBytes);
  start_read(0, later).wait();
  EXPECT_FALSE(delayed.done());
  engine_.release();
  delayed.wait();
  EXPECT_TRUE(to_ == data_);
}

TEST_F(FaultEngineTest, EveryRangeOfANameFailsUntilFaultsAreCleared) {
  engine_.set_where_named(IoCall::kWrite, "dat", IoFault::kFail);
  EXPECT_THROW(start_write(0, data_).wait(), IoError);
  EXPECT_THROW(start_write(0, data_).wait(), IoError);
  engine_.clear_faults();
  EXPECT_NO_THROW(start_write(0, data_).wait());
}

}  // namespace
}  // namespace tessera::testing
