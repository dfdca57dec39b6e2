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

}  // namespace
}  // namespace tessera::comm
