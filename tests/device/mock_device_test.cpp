// The mock device as a judge: wrong programs are found, every time where the mode is lazy; right
// ones never are.
#include "testing/mock_device.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/device/device_support.h"

namespace tessera::device {
namespace {

constexpr std::size_t kBytes = 1000;

class LazyDevice : public ::testing::Test {
 protected:
  Memory make(std::uint8_t value) {
    Memory memory = device_->allocate(Tier::kDevice, kBytes, Role::kOther);
    std::fill_n(memory.data(), kBytes, std::byte{value});
    return memory;
  }

  std::unique_ptr<Device> device_ = make_mock_device();
  Stream& compute_ = device_->stream(StreamKind::kCompute);
  Stream& gather_ = device_->stream(StreamKind::kGather);
  Stream& read_ = device_->stream(StreamKind::kRead);
};

TEST_F(LazyDevice, ShowsPoisonToAReaderThatDoesNotWait) {
  const Memory from = make(1);
  const Memory to = make(1);  // the bytes it will get anyway: old bytes would look right
  const Pending copied = device_->start_copy(to.data(), from.data(), kBytes, gather_);
  EXPECT_TRUE(holds(to.data(), kBytes, kPoisonByte));
  compute_.wait(copied);
  EXPECT_TRUE(holds(to.data(), kBytes, 1));
}

TEST_F(LazyDevice, ShowsPoisonToAStreamThatDoesNotWait) {
  const Memory from = make(1);
  const Memory between = make(0);
  const Memory to = make(0);
  const Pending first = device_->start_copy(between.data(), from.data(), kBytes, gather_);
  // Missing: read_.wait(first).
  const Pending second = device_->start_copy(to.data(), between.data(), kBytes, read_);
  second.wait();
  EXPECT_TRUE(holds(to.data(), kBytes, kPoisonByte));
  first.wait();
}

TEST_F(LazyDevice, SendsTheWrongBytesWhenASourceIsReusedTooEarly) {
  const Memory from = make(1);
  const Memory to = make(0);
  const Pending copied = device_->start_copy(to.data(), from.data(), kBytes, gather_);
  std::fill_n(from.data(), kBytes, std::byte{9});  // missing: copied.wait()
  copied.wait();
  EXPECT_TRUE(holds(to.data(), kBytes, 9));
}

TEST_F(LazyDevice, ShowsOldBytesBehindWorkOfUnknownReach) {
  const Memory from = make(1);
  const Memory to = make(2);
  // The host function may read `to`, so the copy behind it must not have begun.
  const Pending read = gather_.enqueue([] {});
  const Pending copied = device_->start_copy(to.data(), from.data(), kBytes, gather_);
  EXPECT_TRUE(holds(to.data(), kBytes, 2));
  read.wait();
  EXPECT_TRUE(holds(to.data(), kBytes, kPoisonByte));
  copied.wait();
  EXPECT_TRUE(holds(to.data(), kBytes, 1));
}

TEST_F(LazyDevice, DoesNotPoisonWhatWorkAheadStillReadsOrWrites) {
  const Memory a = make(1);
  const Memory b = make(2);
  const Memory c = make(3);
  (void)device_->start_copy(b.data(), a.data(), kBytes, gather_);
  (void)device_->start_copy(a.data(), c.data(), kBytes, gather_);  // reuses a source, in order
  (void)device_->start_fill(b.data() + 1, 5, kBytes - 1, gather_);
  gather_.synchronize();
  EXPECT_TRUE(holds(a.data(), kBytes, 3));
  EXPECT_EQ(b.data()[0], std::byte{1});
  EXPECT_TRUE(holds(b.data() + 1, kBytes - 1, 5));
}

TEST_F(LazyDevice, GivesOutPoisonedMemory) {
  const Memory memory = device_->allocate(Tier::kHost, kBytes, Role::kOther);
  EXPECT_TRUE(holds(memory.data(), kBytes, kPoisonByte));
}

TEST_F(LazyDevice, RunsWhatAWaitDemandsAndNothingElse) {
  std::atomic<int> num_run{0};
  const Pending first = gather_.enqueue([&] { ++num_run; });
  const Pending second = gather_.enqueue([&] { ++num_run; });
  const Pending other = read_.enqueue([&] { ++num_run; });
  EXPECT_FALSE(first.done());
  first.wait();
  EXPECT_EQ(num_run, 1);
  EXPECT_FALSE(second.done());
  EXPECT_FALSE(other.done());
  second.wait();  // or they would count after the counter is gone
  other.wait();
}

TEST_F(LazyDevice, RunsDependenciesAcrossAllStreamsWhenTheLastIsDemanded) {
  const StreamKind kinds[] = {StreamKind::kGather, StreamKind::kRead, StreamKind::kWrite,
                              StreamKind::kReduce, StreamKind::kComm};
  std::vector<int> order;
  Pending last;
  for (int i = 0; i < 40; ++i) {
    Stream& stream = device_->stream(kinds[i % 5]);
    stream.wait(last);
    last = stream.enqueue([&order, i] { order.push_back(i); });
  }
  EXPECT_TRUE(order.empty());
  last.wait();
  ASSERT_EQ(order.size(), 40U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(LazyDevice, WaitsForCompletionsThatAnotherThreadFulfils) {
  const auto arrived = std::make_shared<Completion>();
  bool is_arrived = false;
  bool was_arrived = false;
  read_.wait(Pending(arrived));
  const Pending read = read_.enqueue([&] { was_arrived = is_arrived; });
  gather_.wait(read);
  const Pending last = gather_.record();
  std::thread network([&] {
    is_arrived = true;
    arrived->succeed();
  });
  last.wait();
  EXPECT_TRUE(was_arrived);
  network.join();
}

TEST_F(LazyDevice, DoesNotHangAProgramThatPolls) {
  const Pending work = gather_.enqueue([] {});
  while (!work.done()) {
    std::this_thread::yield();
  }
  work.wait();
}

TEST_F(LazyDevice, LetsAWaitWithALimitEndWhileTheWorkCannotRun) {
  const auto never_yet = std::make_shared<Completion>();
  gather_.wait(Pending(never_yet));
  const Pending work = gather_.enqueue([] {});
  EXPECT_FALSE(work.wait_for(std::chrono::nanoseconds(0)));
  never_yet->succeed();
  EXPECT_TRUE(work.wait_for(std::chrono::nanoseconds::max()));
}

TEST_F(LazyDevice, KeepsPendingsGoodAfterItIsGone) {
  const Pending work = gather_.enqueue([] { throw IoError("disk"); });
  device_.reset();
  EXPECT_TRUE(work.done());
  EXPECT_THROW(work.wait(), IoError);
}

// The life of a gathered layer: read, use, release, again and again in the same place.
int count_wrong_gathers(Device& device, bool forgets_to_wait) {
  Stream& gather = device.stream(StreamKind::kGather);
  Stream& compute = device.stream(StreamKind::kCompute);
  const Memory shard = device.allocate(Tier::kHost, kBytes, Role::kShard);
  const Memory full = device.allocate(Tier::kDevice, kBytes, Role::kFull);
  std::fill_n(shard.data(), kBytes, std::byte{42});
  int num_wrong = 0;
  for (int layer = 0; layer < 50; ++layer) {
    const Pending gathered = device.start_copy(full.data(), shard.data(), kBytes, gather);
    if (!forgets_to_wait) {
      compute.wait(gathered);
    }
    num_wrong += holds(full.data(), kBytes, 42) ? 0 : 1;
    gather.wait(compute.record());
    if (forgets_to_wait) {
      gathered.wait();  // after the use: too late
    }
  }
  gather.synchronize();
  return num_wrong;
}

TEST(MockDevice, InLazyModeFindsTheMissingWaitEveryTime) {
  const auto device = make_mock_device();
  EXPECT_EQ(count_wrong_gathers(*device, true), 50);
}

TEST(MockDevice, NeverBlamesTheRightProgram) {
  EXPECT_EQ(count_wrong_gathers(*make_mock_device(), false), 0);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    MockDeviceOptions options;
    options.mode = LateMode::kRandom;
    options.seed = seed;
    EXPECT_EQ(count_wrong_gathers(*make_mock_device(options), false), 0) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::device
