// Who waits for room in a reserved region, and what ends the wait: a network without peers, which
// the test holds in its hands.
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/comm/staging.h"
#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tests/comm/lone_backend.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxCalls = 4;

// The n-th all-gather says that it was launched, and arrives when the test says so.
struct LaunchNetwork {
  std::array<std::promise<void>, kMaxCalls> launched;
  std::vector<std::shared_ptr<device::Completion>> arrived;

  LaunchNetwork() {
    for (std::size_t i = 0; i < kMaxCalls; ++i) {
      arrived.push_back(std::make_shared<device::Completion>());
    }
  }
};

class LaunchBackend final : public LoneBackend {
 public:
  explicit LaunchBackend(LaunchNetwork& network) : network_(network) {}

  Pending start_all_gather(std::span<const GatherBytes>, const Call&) override {
    const std::size_t index = num_gathers_++;
    network_.launched.at(index).set_value();
    return Pending(network_.arrived.at(index));
  }

 private:
  LaunchNetwork& network_;
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

// Gathers of two small shards each.
class StagingWait : public ::testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 512;
  static constexpr std::size_t kShardBytes = kNumel * sizeof(float);

  StagingWait() : shard_(kNumel), full_(std::size_t{4} * kNumel) {}

  Pending start(Group& group, std::size_t num_shards, const Pending& ready = {}) {
    std::vector<Gather> gathers;
    for (std::size_t i = 0; i < num_shards; ++i) {
      gathers.push_back(
          {shard_.data(), full_.data() + i % 2 * 2 * kNumel, kNumel, DType::kFloat32});
    }
    CallOptions options;
    options.ready = ready;
    return group.start_all_gather(gathers, options);
  }
  static std::size_t call_bytes(std::size_t num_shards) {
    const std::vector<std::size_t> shards(num_shards, kShardBytes);
    return all_gather_staging_bytes(shards, GroupOptions().pack_below_bytes, 2);
  }
  GroupOptions options() {
    GroupOptions options = patient();
    options.ledger = &ledger_;
    return options;
  }
  bool is_launched(std::size_t call) {
    return launched_[call].wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  Ledger ledger_;
  std::vector<float> shard_;
  std::vector<float> full_;
  LaunchNetwork network_;
  std::array<std::future<void>, kMaxCalls> launched_ = {
      network_.launched[0].get_future(), network_.launched[1].get_future(),
      network_.launched[2].get_future(), network_.launched[3].get_future()};
};

TEST_F(StagingWait, CallsAreLaunchedAsLongAsThereIsRoomAndStartedWithoutIt) {
  Group group(std::make_unique<LaunchBackend>(network_), "world", {0, 1}, options());
  group.reserve_staging(2 * call_bytes(2));
  const Pending first = start(group, 2);
  const Pending second = start(group, 2);
  const Pending third = start(group, 2);  // returns, though there is no room
  launched_[0].wait();
  launched_[1].wait();
  EXPECT_FALSE(is_launched(2));
  network_.arrived[0]->succeed();
  first.wait();
  launched_[2].wait();
  network_.arrived[1]->succeed();
  network_.arrived[2]->succeed();
  second.wait();
  third.wait();
  EXPECT_EQ(ledger_.peak_bytes(Tier::kHost, Role::kStaging), 2 * call_bytes(2));
}

TEST_F(StagingWait, ACallThatNeedsMoreThanTheRegionDoesNotWaitForIt) {
  Group group(std::make_unique<LaunchBackend>(network_), "world", {0, 1}, options());
  group.reserve_staging(call_bytes(2));
  const Pending small = start(group, 2);
  const Pending large = start(group, 3);
  launched_[1].wait();
  EXPECT_FALSE(small.done());
  network_.arrived[0]->succeed();
  network_.arrived[1]->succeed();
  large.wait();
}

TEST_F(StagingWait, AFailureEndsTheWaitAndIsTheErrorOfAllCalls) {
  Group group(std::make_unique<LaunchBackend>(network_), "world", {0, 1}, options());
  group.reserve_staging(call_bytes(2));
  const Pending first = start(group, 2);
  const auto ready = std::make_shared<SeenReady>();
  const Pending second = start(group, 2, Pending(ready));
  const Pending third = start(group, 2);
  ready->seen.get_future().wait();
  network_.arrived[0]->fail(std::make_exception_ptr(CommError("the cable is out")));
  for (const Pending& call : {first, second, third}) {
    try {
      call.wait();
      ADD_FAILURE() << "a call came to its end";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("the cable is out"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_FALSE(is_launched(1));
  group.reserve_staging(0);  // waits for nobody any more
}

TEST_F(StagingWait, ARankOnItsWayOutDoesNotWait) {
  const auto ready = std::make_shared<SeenReady>();
  EXPECT_THROW(
      {
        Group group(std::make_unique<LaunchBackend>(network_), "world", {0, 1}, options());
        group.reserve_staging(call_bytes(2));
        const Pending first = start(group, 2);
        const Pending second = start(group, 2, Pending(ready));
        ready->seen.get_future().wait();
        throw ConfigError("the program has failed");
      },
      ConfigError);
  EXPECT_FALSE(is_launched(1));
}

}  // namespace
}  // namespace tessera::comm
