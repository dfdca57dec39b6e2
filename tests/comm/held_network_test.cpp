// What a group does while its network holds a call: a network without peers, which the test has in
// its hands. Who is told what, which call waits for room in a reserved region, and what ends that
// wait.
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxCalls = 4;

// The n-th all-gather says that it was launched, is held in its start while `held_at_start` is n,
// and arrives when the test says so.
struct HeldNetwork {
  HeldNetwork() {
    for (std::size_t i = 0; i < kMaxCalls; ++i) {
      launched[i] = announced[i].get_future();
      arrived[i] = std::make_shared<device::Completion>();
    }
  }
  bool is_launched(std::size_t call) const {
    return launched[call].wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  std::array<std::promise<void>, kMaxCalls> announced;
  std::array<std::future<void>, kMaxCalls> launched;
  std::array<std::shared_ptr<device::Completion>, kMaxCalls> arrived;
  std::size_t held_at_start = kMaxCalls;
  std::promise<void> released;
  std::promise<void> aborted;
};

class HeldBackend final : public Backend {
 public:
  explicit HeldBackend(HeldNetwork& network) : network_(network) {}

  std::string_view name() const override { return "held"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  bool compares_tags() const override { return true; }
  Pending start_all_gather(std::span<const GatherBytes>, const Call&) override {
    const std::size_t index = num_gathers_++;
    network_.announced.at(index).set_value();
    if (index == network_.held_at_start) {
      network_.released.get_future().wait();
    }
    return Pending(network_.arrived.at(index));
  }
  Pending start_all_to_all(const PieceBytes&, const Call&) override { return {}; }
  Pending start_broadcast(void*, std::size_t, int, const Call&) override { return {}; }
  std::unique_ptr<Backend> split(std::span<const int>, const std::string&) override { return {}; }
  std::size_t broadcast_sent_bytes(std::size_t, int) const override { return 0; }
  void abort(const std::string&) override { network_.aborted.set_value(); }

 private:
  HeldNetwork& network_;
  std::size_t num_gathers_ = 0;  // the launcher's own
};

// The launcher looks at a call's input right before it looks for room.
class SeenReady final : public device::PendingState {
 public:
  bool done() override {
    if (!is_seen_) {
      is_seen_ = true;
      seen.set_value();
    }
    return true;
  }
  void wait() override { done(); }
  bool wait_for(std::chrono::nanoseconds) override { return done(); }

  std::promise<void> seen;

 private:
  bool is_seen_ = false;
};

class HeldNetworkTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 512;
  static constexpr std::size_t kShardBytes = kNumel * sizeof(float);

  std::unique_ptr<Group> make_group() {
    GroupOptions options = patient();
    options.ledger = &ledger_;
    return std::make_unique<Group>(std::make_unique<HeldBackend>(network_), "world",
                                   std::vector<int>{0, 1}, options);
  }
  // A gather of small shards, which travel together.
  Pending start(Group& group, std::size_t num_shards, const Pending& ready = {}) {
    const std::vector<Gather> gathers(num_shards,
                                      {shard_.data(), full_.data(), kNumel, DType::kFloat32});
    CallOptions options;
    options.ready = ready;
    return group.start_all_gather(gathers, options);
  }
  static std::size_t call_bytes(std::size_t num_shards) {
    const std::vector<std::size_t> shards(num_shards, kShardBytes);
    return all_gather_staging_bytes(shards, GroupOptions().pack_below_bytes, 2);
  }
  static void expect_cable_out(const Pending& call) {
    try {
      call.wait();
      ADD_FAILURE() << "a call succeeded";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("the cable is out"), std::string::npos)
          << error.what();
    }
  }
  void fail(std::size_t call) {
    network_.arrived[call]->fail(std::make_exception_ptr(CommError("the cable is out")));
  }

  Ledger ledger_;
  std::vector<float> shard_ = std::vector<float>(kNumel);
  std::vector<float> full_ = std::vector<float>(std::size_t{2} * kNumel);
  HeldNetwork network_;
};

TEST_F(HeldNetworkTest, CallsAreLaunchedAsLongAsThereIsRoomAndStartedWithoutIt) {
  const auto group = make_group();
  group->reserve_staging(2 * call_bytes(2));
  const Pending first = start(*group, 2);
  const Pending second = start(*group, 2);
  const Pending third = start(*group, 2);  // returns, though there is no room
  network_.launched[0].wait();
  network_.launched[1].wait();
  EXPECT_FALSE(network_.is_launched(2));
  network_.arrived[0]->succeed();
  first.wait();
  network_.launched[2].wait();
  network_.arrived[1]->succeed();
  network_.arrived[2]->succeed();
  second.wait();
  third.wait();
  EXPECT_EQ(ledger_.peak_bytes(Tier::kHost, Role::kStaging), 2 * call_bytes(2));
}

TEST_F(HeldNetworkTest, ACallThatNeedsMoreThanTheRegionDoesNotWaitForIt) {
  const auto group = make_group();
  group->reserve_staging(call_bytes(2));
  const Pending small = start(*group, 2);
  const Pending large = start(*group, 3);
  network_.launched[1].wait();
  EXPECT_FALSE(small.done());
  network_.arrived[0]->succeed();
  network_.arrived[1]->succeed();
  large.wait();
}

TEST_F(HeldNetworkTest, AFailureEndsTheWaitForRoomAndIsTheErrorOfAllCalls) {
  const auto group = make_group();
  group->reserve_staging(call_bytes(2));
  const Pending first = start(*group, 2);
  const auto ready = std::make_shared<SeenReady>();
  const Pending second = start(*group, 2, Pending(ready));
  const Pending third = start(*group, 2);
  ready->seen.get_future().wait();
  fail(0);
  for (const Pending& call : {first, second, third}) {
    expect_cable_out(call);
  }
  EXPECT_FALSE(network_.is_launched(1));
  group->reserve_staging(0);  // waits for nobody any more
}

TEST_F(HeldNetworkTest, AFailingRankDoesNotWaitForRoom) {
  const auto ready = std::make_shared<SeenReady>();
  EXPECT_THROW(
      {
        const auto group = make_group();
        group->reserve_staging(call_bytes(2));
        const Pending first = start(*group, 2);
        const Pending second = start(*group, 2, Pending(ready));
        ready->seen.get_future().wait();
        throw ConfigError("the program has failed");
      },
      ConfigError);
  EXPECT_FALSE(network_.is_launched(1));
}

// The second call is still being started, with the caller's memory in hand.
TEST_F(HeldNetworkTest, AFailureIsToldOnlyWhenNoThreadOfTheQueueHoldsTheMemory) {
  network_.held_at_start = 1;
  const auto group = make_group();
  const Pending first = start(*group, 1);
  const Pending second = start(*group, 1);
  auto told = std::async(std::launch::async, [&] { expect_cable_out(first); });
  network_.launched[1].wait();
  fail(0);
  network_.aborted.get_future().wait();  // the queue knows, and has told the network
  // Waits for what must not happen: too short a limit can only miss a mistake, never invent one.
  EXPECT_EQ(told.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  EXPECT_FALSE(second.done());
  network_.released.set_value();
  told.wait();
  expect_cable_out(second);
}

// A large tensor, two small ones and another large one: the first large one is arrival 0, the other
// 1, and the small ones, which travel together, are arrival 2.
class HeldGatherTest : public HeldNetworkTest {
 protected:
  HeldGatherTest() {
    std::vector<Gather> gathers;
    for (const std::int64_t numel : {kLarge, kNumel, kNumel, kLarge}) {
      gathers.push_back({large_.data(), both_.data(), numel, DType::kFloat32});
    }
    each_ = group_->start_all_gathers(gathers);
  }
  ~HeldGatherTest() override {
    for (const auto& arrival : network_.arrived) {
      if (!arrival->done()) {
        arrival->succeed();
      }
    }
  }
  void arrive(std::size_t part) { network_.arrived[part]->succeed(); }

  static constexpr std::int64_t kLarge = 20011;
  std::vector<float> large_ = std::vector<float>(kLarge);
  std::vector<float> both_ = std::vector<float>(2 * kLarge);
  const std::unique_ptr<Group> group_ = make_group();
  std::vector<Pending> each_;
};

TEST_F(HeldGatherTest, ATensorIsThereWhileLaterOnesAreHeld) {
  arrive(0);
  each_[0].wait();
  EXPECT_FALSE(each_[1].done() || each_[2].done() || each_[3].done());
  arrive(1);
  each_[3].wait();
  EXPECT_FALSE(each_[1].done() || each_[2].done());
  arrive(2);
  each_[1].wait();
  each_[2].wait();
}

TEST_F(HeldGatherTest, ATensorIsThereWhileEarlierOnesAreHeld) {
  arrive(2);
  each_[1].wait();
  each_[2].wait();
  EXPECT_FALSE(each_[0].done() || each_[3].done());
  arrive(1);
  each_[3].wait();
  EXPECT_FALSE(each_[0].done());
  arrive(0);
  each_[0].wait();
}

TEST_F(HeldGatherTest, WhenOneFailsWhatHasArrivedStaysAndTheRestFails) {
  arrive(1);
  each_[3].wait();
  fail(0);
  for (const std::size_t i : {0, 1, 2}) {
    expect_cable_out(each_[i]);
  }
  each_[3].wait();
}

}  // namespace
}  // namespace tessera::comm
