#include "tessera/tier/range_queue.h"

#include <fcntl.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/aligned_bytes.h"

namespace tessera::tier {
namespace {

using testing::AlignedBytes;

// The queue never looks into a file, so any will do; `is_direct` as the test needs it.
std::unique_ptr<IoFile> any_file(bool is_direct) {
  return std::make_unique<IoFile>("some/file", ::open("/dev/null", O_RDWR | O_CLOEXEC), is_direct);
}

class RangeQueueTest : public ::testing::Test {
 protected:
  Pending push(std::uint64_t offset, std::size_t bytes) {
    return queue_.push_read(*file_, offset, memory_.data(), bytes, "test data");
  }
  Pending push_write(std::uint64_t offset, std::size_t bytes) {
    return queue_.push_write(*file_, offset, memory_.data(), bytes, "test data");
  }
  std::string failure_of(const Pending& pending) {
    EXPECT_TRUE(pending.done());
    try {
      pending.wait();
    } catch (const IoError& error) {
      return error.what();
    }
    return "no failure";
  }

  int num_wakes_ = 0;
  std::unique_ptr<IoFile> file_ = any_file(false);
  AlignedBytes memory_{8 * kBlockBytes};
  RangeQueue queue_{2 * kBlockBytes, [this] { ++num_wakes_; }};
};

TEST_F(RangeQueueTest, CutsRangesInTheirOrder) {
  const Pending first = push(0, 5 * kBlockBytes);
  const Pending second = push(100 * kBlockBytes, kBlockBytes);
  std::vector<IoRequest> requests;
  while (std::optional<IoRequest> request = queue_.try_take()) {
    requests.push_back(*request);
  }
  ASSERT_EQ(requests.size(), 4U);
  const std::vector<std::uint64_t> offsets = {0, 2, 4, 100};
  const std::vector<std::size_t> blocks = {2, 2, 1, 1};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(requests[i].offset, offsets[i] * kBlockBytes);
    EXPECT_EQ(requests[i].bytes, blocks[i] * kBlockBytes);
    EXPECT_TRUE(queue_.advance(requests[i], static_cast<ssize_t>(requests[i].bytes)));
    EXPECT_EQ(first.done(), i >= 2);
    EXPECT_EQ(second.done(), i == 3);
  }
}

TEST_F(RangeQueueTest, ReadsAndWritesTakeTurns) {
  const std::vector<Pending> pushed = {
      push_write(0, 4 * kBlockBytes), push_write(10 * kBlockBytes, 4 * kBlockBytes),
      push(20 * kBlockBytes, 3 * kBlockBytes), push(30 * kBlockBytes, kBlockBytes)};
  std::vector<std::uint64_t> blocks;
  while (std::optional<IoRequest> request = queue_.try_take()) {
    blocks.push_back(request->offset / kBlockBytes);
    EXPECT_EQ(request->direction == IoDirection::kRead, blocks.back() >= 20);
    EXPECT_TRUE(queue_.advance(*request, static_cast<ssize_t>(request->bytes)));
  }
  EXPECT_EQ(blocks, (std::vector<std::uint64_t>{20, 0, 22, 2, 30, 10, 12}));
  for (const Pending& each : pushed) {
    EXPECT_TRUE(each.done());
  }
  EXPECT_TRUE(queue_.sleep_if_empty());
}

TEST_F(RangeQueueTest, AShortTransferIsContinuedWhereItStopped) {
  const Pending pending = push(kBlockBytes, 2 * kBlockBytes);
  IoRequest request = *queue_.try_take();
  EXPECT_FALSE(queue_.advance(request, 5000));
  EXPECT_EQ(request.rest_offset(), kBlockBytes + 5000);
  EXPECT_EQ(request.rest_memory(), memory_.data() + 5000);
  EXPECT_EQ(request.rest_bytes(), 2 * kBlockBytes - 5000);
  EXPECT_FALSE(pending.done());
  EXPECT_TRUE(queue_.advance(request, 2 * kBlockBytes - 5000));
  EXPECT_NO_THROW(pending.wait());
}

TEST_F(RangeQueueTest, AShortDirectTransferIsContinuedAtAWholeBlock) {
  file_ = any_file(true);
  const Pending pending = push(0, 2 * kBlockBytes);
  IoRequest request = *queue_.try_take();
  EXPECT_FALSE(queue_.advance(request, 5000));
  EXPECT_EQ(request.rest_offset(), kBlockBytes);
  EXPECT_TRUE(queue_.advance(request, 904));  // as before: the file ends there
  EXPECT_NE(failure_of(pending).find("the file ends after 5000 of them"), std::string::npos);
}

TEST_F(RangeQueueTest, AnInterruptedTransferIsRepeatedButNotForEver) {
  const Pending pending = push(0, kBlockBytes);
  IoRequest request = *queue_.try_take();
  EXPECT_FALSE(queue_.advance(request, -EINTR));
  EXPECT_FALSE(queue_.advance(request, -EAGAIN));
  EXPECT_FALSE(queue_.advance(request, 100));  // progress: all retries are there again
  int num_retries = 0;
  while (!queue_.advance(request, -EAGAIN)) {
    ++num_retries;
    ASSERT_LT(num_retries, 100000);
  }
  EXPECT_EQ(num_retries, 1000);
  EXPECT_NE(failure_of(pending).find("(11)"), std::string::npos);
}

TEST_F(RangeQueueTest, AfterAFailureNothingMoreOfItsRangeIsBegun) {
  const Pending failing = push(0, 8 * kBlockBytes);
  const Pending good = push(50 * kBlockBytes, kBlockBytes);
  IoRequest first = *queue_.try_take();
  IoRequest second = *queue_.try_take();
  EXPECT_TRUE(queue_.advance(second, -EIO));
  EXPECT_FALSE(failing.done());  // the other request still uses its memory
  IoRequest next = *queue_.try_take();
  EXPECT_EQ(next.offset, 50 * kBlockBytes);
  EXPECT_TRUE(queue_.advance(first, 2 * kBlockBytes));
  EXPECT_NE(failure_of(failing).find("at offset 8192 of some/file failed: Input/output error (5)"),
            std::string::npos);
  EXPECT_TRUE(queue_.advance(next, kBlockBytes));
  EXPECT_NO_THROW(good.wait());
  EXPECT_EQ(queue_.counts().num_reads, 1U);
}

TEST_F(RangeQueueTest, OfSeveralFailuresTheFirstInTheFileIsTold) {
  const Pending pending = push(0, 6 * kBlockBytes);
  IoRequest first = *queue_.try_take();
  IoRequest second = *queue_.try_take();
  IoRequest third = *queue_.try_take();
  EXPECT_TRUE(queue_.advance(third, -ENOSPC));
  EXPECT_TRUE(queue_.advance(first, -EIO));
  EXPECT_TRUE(queue_.advance(second, -ENOSPC));
  EXPECT_NE(failure_of(pending).find("at offset 0 of"), std::string::npos);
}

TEST_F(RangeQueueTest, ASleeperIsWokenOnceAndOnlyIfItSleeps) {
  static_cast<void>(push(0, kBlockBytes));
  EXPECT_EQ(num_wakes_, 0);
  EXPECT_FALSE(queue_.sleep_if_empty());
  IoRequest request = *queue_.try_take();
  EXPECT_TRUE(queue_.sleep_if_empty());
  static_cast<void>(push(0, kBlockBytes));
  static_cast<void>(push(0, kBlockBytes));
  EXPECT_EQ(num_wakes_, 1);
  queue_.close();
  EXPECT_EQ(num_wakes_, 2);
  int num_left = queue_.advance(request, kBlockBytes) ? 0 : 100;
  while (std::optional<IoRequest> left = queue_.take()) {
    num_left += queue_.advance(*left, kBlockBytes) ? 1 : 100;
  }
  EXPECT_EQ(num_left, 2);  // what was pushed before closing is still handed out
}

TEST_F(RangeQueueTest, ARangeBehindTheEndOfAnyFileIsRefused) {
  EXPECT_THROW(static_cast<void>(push(~std::uint64_t{0} - 10, kBlockBytes)), InternalError);
}

}  // namespace
}  // namespace tessera::tier
