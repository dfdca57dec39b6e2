// What a rank that still waits is told when others have failed, or have not arrived.
#include "tessera/comm/watchdog.h"

#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/hash_store.h"

namespace tessera::comm {
namespace {

class WatchdogTest : public ::testing::Test {
 protected:
  explicit WatchdogTest(std::unique_ptr<Store> store = std::make_unique<HashStore>()) {
    options_.group = "world";
    options_.rank = 3;
    options_.world_ranks = {0, 1, 2, 3};
    options_.timeout = std::chrono::minutes(10);
    options_.heartbeat = std::chrono::milliseconds(1);
    options_.status = std::make_shared<StatusStore>(std::move(store), 4);
  }

  void post_failure(int rank, const std::string& text) {
    options_.status->post_failure(rank, RankFailure{text});
  }

  // What waiting for call number 2 throws.
  template <typename Thrown = PeerError>
  std::string told(
      const device::Pending& pending = device::Pending(std::make_shared<device::Completion>())) {
    Watchdog watchdog(options_);
    CallTag tag;
    tag.sequence = 2;
    watchdog.started(tag, "barrier #2");
    try {
      watchdog.await(pending, tag, "barrier #2");
    } catch (const Thrown& error) {
      return error.what();
    }
    return "nothing";
  }
  std::string told_at_the_limit(std::chrono::milliseconds heartbeat) {
    options_.timeout = std::chrono::milliseconds(1);
    options_.heartbeat = heartbeat;
    return told<CommError>();
  }

  WatchdogOptions options_;
};

TEST_F(WatchdogTest, SaysOnceWhatSeveralRanksSayAndEveryCauseThereIs) {
  post_failure(0, "barrier #2 in group 'world' waited 5 s");
  post_failure(1, "disk is full");
  post_failure(2, "barrier #2 in group 'world' waited 5 s");
  EXPECT_EQ(told(),
            "barrier #2 in group 'world' was aborted: ranks 0, 2 failed: barrier #2 in group "
            "'world' waited 5 s; rank 1 failed: disk is full");
}

// Another rank has compared the tags of a call before this one did, and has told: it is this rank's
// own error, in the same words.
TEST_F(WatchdogTest, AMismatchThatAnotherRankFoundIsToldAsIfFoundHere) {
  post_failure(0, "disk is full");
  options_.status->post_failure(1, MismatchError("rank 2 called broadcast #1"));
  EXPECT_EQ(told<MismatchError>(), "rank 2 called broadcast #1");
  // The same if the peer that told has closed its connections since.
  EXPECT_EQ(told<MismatchError>(
                device::Pending::failed(std::make_exception_ptr(PeerError("connection closed")))),
            "rank 2 called broadcast #1");
}

TEST_F(WatchdogTest, DoesNotSayACallTwiceThatFailsWithItsOwnWords) {
  const std::string said = "barrier #2 in group 'world' waited 5 s, the limit comm.timeout_s";
  EXPECT_EQ(told<CommError>(device::Pending::failed(std::make_exception_ptr(CommError(said)))),
            said);
}

TEST_F(WatchdogTest, AtTheLimitDoesNotWaitForARankThatIsSilent) {
  for (const int rank : {0, 2}) {
    options_.status->post("world", rank, {2, 1, 7, "barrier #2"});
  }
  options_.status->post("world", 1, {1, 1, 7, "barrier #1"});
  // A heartbeat that this test would not survive.
  EXPECT_EQ(told_at_the_limit(std::chrono::hours(24)),
            "barrier #2 in group 'world' waited 0.001 s, the limit comm.timeout_s: rank 1 has not "
            "arrived; rank 1 last completed barrier #1; if they are only slow, raise "
            "comm.timeout_s");
}

// Rank 1 posts its status whenever that is read, and arrives with its fourth post.
class LateStore final : public HashStore {
 public:
  std::optional<std::string> try_get(const std::string& key) override {
    if (key == "status/rank/world/1") {
      ++num_reads_;
      set(key,
          (num_reads_ < 4 ? "1 1 " : "2 1 ") + std::to_string(num_reads_ / 2 * 2) + " barrier");
    }
    return HashStore::try_get(key);
  }

 private:
  int num_reads_ = 0;
};

class LateWatchdogTest : public WatchdogTest {
 protected:
  LateWatchdogTest() : WatchdogTest(std::make_unique<LateStore>()) {}
};

TEST_F(LateWatchdogTest, AtTheLimitDoesNotAccuseARankThatArrivedAtTheLastMoment) {
  for (const int rank : {0, 2}) {
    options_.status->post("world", rank, {2, 1, 7, "barrier #2"});
  }
  const std::string text = told_at_the_limit(std::chrono::minutes(10));
  EXPECT_NE(text.find("all ranks have arrived"), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera::comm
