// When the owners of a call's memory are told that it failed: not before the queue's own threads
// have let go of that memory. A network without peers, which the test holds in its hands.
#include <chrono>
#include <future>
#include <memory>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/core/error.h"
#include "tests/comm/lone_backend.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

// The first all-gather arrives when the test says so; the second is still being started, with the
// caller's memory in hand, until the test lets it go.
struct EndlessNetwork {
  const std::shared_ptr<device::Completion> first = std::make_shared<device::Completion>();
  std::promise<void> second_entered;
  std::promise<void> second_released;
  std::promise<void> aborted;
};

class EndlessBackend final : public LoneBackend {
 public:
  explicit EndlessBackend(EndlessNetwork& network) : network_(network) {}

  Pending start_all_gather(std::span<const GatherBytes>, const Call&) override {
    if (num_gathers_++ == 0) {
      return Pending(network_.first);
    }
    network_.second_entered.set_value();
    network_.second_released.get_future().wait();
    return Pending::failed(std::make_exception_ptr(PeerError("aborted")));
  }
  void abort(const std::string&) override { network_.aborted.set_value(); }

 private:
  EndlessNetwork& network_;
  int num_gathers_ = 0;  // the launcher's own
};

TEST(CallEndTest, AFailureIsToldOnlyWhenNoThreadOfTheQueueHoldsTheMemory) {
  EndlessNetwork network;
  Group group(std::make_unique<EndlessBackend>(network), "world", {0, 1}, patient());
  const std::vector<float> shard(16, 1.0F);
  std::vector<float> full(32);
  const std::vector<Gather> gathers = {{shard.data(), full.data(), 16, DType::kFloat32}};
  const Pending first = group.start_all_gather(gathers);
  const Pending second = group.start_all_gather(gathers);
  auto first_told = std::async(std::launch::async, [&] { EXPECT_THROW(first.wait(), CommError); });
  auto second_told =
      std::async(std::launch::async, [&] { EXPECT_THROW(second.wait(), CommError); });
  network.second_entered.get_future().wait();
  network.first->fail(std::make_exception_ptr(CommError("the cable is out")));
  network.aborted.get_future().wait();  // the queue knows, and has told the network

  // Waits for what must not come: too short a limit can only miss a mistake, never invent one.
  const auto limit = std::chrono::milliseconds(100);
  EXPECT_EQ(first_told.wait_for(limit), std::future_status::timeout);
  EXPECT_EQ(second_told.wait_for(limit), std::future_status::timeout);
  network.second_released.set_value();
  second_told.wait();
  first_told.wait();
}

}  // namespace
}  // namespace tessera::comm
