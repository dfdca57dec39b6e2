// What a rank that still waits is told when others have failed.
#include "tessera/comm/watch.h"

#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Rank 3 of four waits for a call that never ends.
std::string told(const std::shared_ptr<Board>& board) {
  WatchOptions options;
  options.group = "world";
  options.rank = 3;
  options.world_ranks = {0, 1, 2, 3};
  options.timeout = std::chrono::minutes(10);
  options.beat = std::chrono::milliseconds(1);
  options.board = board;
  Watch watch(options);
  const device::Pending never(std::make_shared<device::Completion>());
  try {
    watch.await(never, CallTag(), "all_gather #1");
  } catch (const PeerError& error) {
    return error.what();
  }
  return "nothing";
}

TEST(Watch, SaysOnceWhatAllOtherRanksFound) {
  const auto board = std::make_shared<MemoryBoard>();
  board->post_failure(0, "all_gather #1 in group 'world': rank 2 called broadcast #1");
  board->post_failure(1, "all_gather #1 in group 'world': rank 2 called broadcast #1");
  board->post_failure(2, "broadcast #1 in group 'world': rank 2 called broadcast #1");
  EXPECT_EQ(told(board),
            "all_gather #1 in group 'world' was given up: ranks 0, 1, 2 failed: "
            "all_gather #1 in group 'world': rank 2 called broadcast #1");
}

TEST(Watch, DoesNotRepeatACauseForThoseWhoGaveUpBecauseOfIt) {
  const std::string cause = "disk is full";
  const std::string repeated =
      "barrier #4 in group 'world' was given up: rank 1 failed: disk is full";
  const auto first = std::make_shared<MemoryBoard>();
  first->post_failure(0, cause);
  first->post_failure(2, repeated);
  EXPECT_EQ(told(first),
            "all_gather #1 in group 'world' was given up: ranks 0, 2 failed: disk is full");
  const auto last = std::make_shared<MemoryBoard>();
  last->post_failure(0, repeated);
  last->post_failure(1, cause);
  EXPECT_EQ(told(last),
            "all_gather #1 in group 'world' was given up: ranks 0, 1 failed: " + repeated);
}

TEST(Watch, SaysEveryCauseThereIs) {
  const auto board = std::make_shared<MemoryBoard>();
  board->post_failure(0, "");
  board->post_failure(1, "disk is full");
  board->post_failure(2, "reduce #2 in group 'world': a value is not finite");
  EXPECT_EQ(told(board),
            "all_gather #1 in group 'world' was given up: rank 0 failed: ; rank 1 failed: disk is "
            "full; rank 2 failed: reduce #2 in group 'world': a value is not finite");
}

// Rank 0 waits for call 2 of three ranks until its time is over.
std::string told_at_the_limit(const std::shared_ptr<Board>& board, std::chrono::milliseconds beat) {
  WatchOptions options;
  options.group = "world";
  options.rank = 0;
  options.world_ranks = {0, 1, 2};
  options.timeout = std::chrono::milliseconds(1);
  options.beat = beat;
  options.board = board;
  Watch watch(options);
  CallTag tag;
  tag.sequence = 2;
  watch.started(tag, "barrier #2");
  const device::Pending never(std::make_shared<device::Completion>());
  try {
    watch.await(never, tag, "barrier #2");
  } catch (const CommError& error) {
    return error.what();
  }
  return "nothing";
}

TEST(Watch, DoesNotSayACallTwiceThatFailsWithItsOwnWords) {
  WatchOptions options;
  options.group = "world";
  options.world_ranks = {0};
  options.timeout = std::chrono::minutes(10);
  options.beat = std::chrono::milliseconds(1);
  Watch watch(options);
  const auto completion = std::make_shared<device::Completion>();
  completion->fail(std::make_exception_ptr(
      CommError("barrier #2 in group 'world' waited 5 s, the limit comm.timeout_s")));
  try {
    watch.await(device::Pending(completion), CallTag(), "barrier #2");
    FAIL() << "expected CommError";
  } catch (const CommError& error) {
    EXPECT_EQ(std::string(error.what()),
              "barrier #2 in group 'world' waited 5 s, the limit comm.timeout_s");
  }
}

TEST(Watch, AtTheLimitDoesNotWaitForTheWordsOfARankThatIsSilent) {
  const auto board = std::make_shared<MemoryBoard>();
  board->post("world", 1, {1, 1, 7, "barrier #1"});
  board->post("world", 2, {2, 1, 7, "barrier #2"});
  // A beat that this test would not survive.
  EXPECT_EQ(told_at_the_limit(board, std::chrono::hours(24)),
            "barrier #2 in group 'world' waited 0.001 s, the limit comm.timeout_s: rank 1 has not "
            "come; rank 1 last completed barrier #1; if they are only slow, raise comm.timeout_s");
}

// A board on which rank 1 posts whenever it is read, and comes with its fourth post.
class LateBoard final : public Board {
 public:
  void post(const std::string& group, int rank, const BoardEntry& entry) override {
    memory_.post(group, rank, entry);
  }
  std::optional<BoardEntry> read(const std::string& group, int rank) override {
    if (rank == 1) {
      ++beat_;
      memory_.post(group, 1, {beat_ < 4 ? 1U : 2U, 1, beat_ / 2 * 2, "barrier"});
    }
    return memory_.read(group, rank);
  }
  void post_failure(int rank, const std::string& text) override {
    memory_.post_failure(rank, text);
  }
  std::map<int, std::string> failures() override { return memory_.failures(); }
  bool reachable() override { return true; }

 private:
  MemoryBoard memory_;
  std::uint64_t beat_ = 0;
};

TEST(Watch, AtTheLimitDoesNotAccuseARankThatCameAtTheLastMoment) {
  const auto board = std::make_shared<LateBoard>();
  board->post("world", 2, {2, 1, 7, "barrier #2"});
  const std::string text = told_at_the_limit(board, std::chrono::milliseconds(200));
  EXPECT_NE(text.find("all ranks have come"), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera::comm
