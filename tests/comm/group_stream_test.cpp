// Collectives in the order of streams, on a device that is as late as it may be. A program that
// names its stream gets the right numbers; one that forgets meets poison: shown both ways, so that
// this test is known to see the mistake.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/backend.h"
#include "tessera/core/error.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/comm/counted_pending.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

using device::LateMode;
using device::Memory;
using device::StreamKind;

constexpr std::int64_t kStreamNumel = 5003;
constexpr std::size_t kBytes = kStreamNumel * sizeof(float);

std::unique_ptr<device::Device> late(LateMode mode, int rank) {
  device::MockDeviceOptions options;
  options.mode = mode;
  options.seed = static_cast<std::uint64_t>(rank) + 11;
  return device::make_mock_device(options);
}

// Reads a shard through a late stream, gathers it, reduces what was gathered, writes it back.
// `ordered` false: the collectives are not told of the streams.
float last_value_after_a_step(Group& group, LateMode mode, bool ordered) {
  const auto device = late(mode, group.rank());
  const auto num_ranks = static_cast<std::size_t>(group.size());
  const auto take = [&](std::size_t bytes) {
    return device->allocate(Tier::kDevice, bytes, Role::kOther);
  };
  std::vector<float> stored(kStreamNumel, static_cast<float>(group.rank() + 1));
  std::vector<float> result(kStreamNumel, -1.0F);
  const Memory shard = take(kBytes);
  const Memory full = take(kBytes * num_ranks);
  const Memory sum = take(kBytes);
  device::Stream& read = device->stream(StreamKind::kRead);
  device::Stream& write = device->stream(StreamKind::kWrite);

  std::ignore = device->start_copy(shard.data(), stored.data(), kBytes, read);
  CallOptions options;
  options.stream = ordered ? &read : nullptr;
  const Gather gather{shard.data(), full.data(), kStreamNumel, DType::kFloat32};
  const Pending gathered = group.start_all_gather({&gather, 1}, options);
  gathered.wait();
  const Pending reduced = group.start_reduce_scatter(full.data(), sum.data(), kStreamNumel,
                                                     DType::kFloat32, DType::kFloat32, options);
  write.wait(reduced);
  std::ignore = device->start_copy(result.data(), sum.data(), kBytes, write);
  write.synchronize();
  read.synchronize();
  return result.back();
}

TEST(GroupStream, CallsReadTheirInputAfterTheirStream) {
  for (const LateMode mode : {LateMode::kLazy, LateMode::kRandom}) {
    for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
      run_ranks(num_ranks, [&](Group& group) {
        // Rank r's piece is the sum over ranks of shard r: num_ranks * (r + 1).
        EXPECT_EQ(last_value_after_a_step(group, mode, true),
                  static_cast<float>(group.size() * (group.rank() + 1)));
      });
    }
  }
}

TEST(GroupStream, AForgottenStreamMeetsPoison) {
  run_ranks(2, [&](Group& group) {
    const float wrong = last_value_after_a_step(group, LateMode::kLazy, false);
    EXPECT_TRUE(std::isnan(wrong)) << wrong;
  });
}

TEST(GroupStream, ALateInputHoldsUpLaterCallsButChangesNoOrder) {
  run_ranks(3, [&](Group& group) {
    const auto device = late(LateMode::kRandom, group.rank());
    device::Stream& read = device->stream(StreamKind::kRead);
    std::vector<std::int64_t> source(64, 1);
    std::vector<std::int64_t> late_data(64, 0);
    std::vector<std::int64_t> early_data(64, 10);
    for (int round = 0; round < 30; ++round) {
      std::fill(early_data.begin(), early_data.end(), 10);
      std::ignore = device->start_copy(late_data.data(), source.data(), 64 * 8, read);
      CallOptions behind;
      behind.stream = &read;
      const Pending second_hand =
          group.start_all_reduce(late_data.data(), 64, DType::kInt64, Reduction::kSum, behind);
      const Pending at_once = group.start_all_reduce(early_data.data(), 64, DType::kInt64);
      at_once.wait();
      EXPECT_TRUE(second_hand.done());  // calls of a group finish in their order
      EXPECT_EQ(late_data.back(), 3);
      EXPECT_EQ(early_data.back(), 30);
    }
    read.synchronize();
  });
}

// Streams whose work stands still until the test lets it go on.
TEST(GroupStream, NeitherBytesOfTheHostNorAgreementWaitForTheDevice) {
  ThreadWorldOptions ranks;
  ranks.num_ranks = 3;
  ranks.on_streams = true;
  run_ranks(ranks, {}, [](Group& group) {
    const auto device = late(LateMode::kRandom, group.rank());
    device::Stream& reduce = device->stream(StreamKind::kReduce);
    const auto gate = std::make_shared<device::Completion>();
    std::ignore = reduce.enqueue([gate] { gate->wait(); });
    std::vector<double> sums(8, group.rank());
    CallOptions options;
    options.stream = &reduce;
    const Pending reduced =
        group.start_all_reduce(sums.data(), 8, DType::kFloat64, Reduction::kSum, options);
    const std::vector<std::byte> mine(5, static_cast<std::byte>(group.rank() + 1));
    const HostGather all = group.start_gather_host(mine, options);
    all.done.wait();
    EXPECT_TRUE(all.done.done());
    for (std::size_t i = 0; i < 15; ++i) {
      EXPECT_EQ(all.bytes.get()[i], static_cast<std::byte>(i / 5 + 1));
    }
    group.wait_agreed();
    EXPECT_FALSE(reduced.done());
    gate->succeed();
    reduced.wait();
    EXPECT_EQ(sums.back(), 3);
  });
}

TEST(GroupStream, AgreementThrowsWhatTheCallsThatDifferWould) {
  for (const bool on_streams : {true, false}) {
    ThreadWorldOptions ranks;
    ranks.num_ranks = 3;
    ranks.on_streams = on_streams;
    run_ranks(ranks, {}, [&](Group& group) {
      const auto device = late(LateMode::kRandom, group.rank());
      float number = 1;
      CallOptions options;
      options.stream = &device->stream(StreamKind::kReduce);
      group.wait_agreed();  // on nothing
      options.label.unit = group.rank() == 1 ? "head" : "block";
      std::ignore = group.start_all_reduce(&number, 1, DType::kFloat32, Reduction::kSum, options);
      options.label.unit = "behind it";
      const HostGather behind = group.start_gather_host({}, options);
      const HostGather bytes = group.start_gather_host(std::vector<std::byte>(3), options);
      for (int i = 0; i < 2; ++i) {
        try {
          group.wait_agreed();
          ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
        } catch (const MismatchError& error) {
          EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
        }
        EXPECT_THROW(bytes.done.wait(), MismatchError);
        EXPECT_THROW(behind.done.wait(), MismatchError);
      }
    });
  }
}

// --- Work that does not leave its stream.

// Records how long whoever has given up on it waits for it.
class StuckWork final : public device::PendingState {
 public:
  explicit StuckWork(std::vector<std::chrono::nanoseconds>& limits) : limits_(limits) {}
  bool done() override { return false; }
  void wait() override { never_->wait(); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    if (limit <= patient().heartbeat) {
      return never_->wait_for(limit);
    }
    limits_.push_back(limit);
    const auto now = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() == now) {  // some time passes
    }
    return false;
  }

 private:
  std::vector<std::chrono::nanoseconds>& limits_;
  const std::shared_ptr<device::Completion> never_ = std::make_shared<device::Completion>();
};

class StuckBackend final : public Backend {
 public:
  explicit StuckBackend(std::vector<std::chrono::nanoseconds>& limits) : limits_(limits) {}
  std::string_view name() const override { return "stuck"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  bool compares_tags() const override { return true; }
  bool stream_ordered() const override { return true; }
  Pending start_all_gather(std::span<const GatherBytes>, const Call&) override {
    return Pending(std::make_shared<StuckWork>(limits_));
  }
  Pending start_all_to_all(const PieceBytes&, const Call&) override { return {}; }
  Pending start_broadcast(void*, std::size_t, int, const Call&) override { return {}; }
  std::unique_ptr<Backend> split(std::span<const int>, const std::string&) override { return {}; }
  std::size_t broadcast_sent_bytes(std::size_t, int) const override { return 0; }
  void abort(const std::string&) override {}

 private:
  std::vector<std::chrono::nanoseconds>& limits_;
};

TEST(GroupStream, AbortedCallsShareOneLimitForLeavingTheirStream) {
  std::vector<std::chrono::nanoseconds> limits;
  const auto device = late(LateMode::kRandom, 0);
  Group group(std::make_unique<StuckBackend>(limits), "world", {0, 1}, patient());
  CallOptions options;
  options.stream = &device->stream(StreamKind::kGather);
  std::vector<Pending> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(group.start_barrier(options));
  }
  group.abort("enough of it");
  for (const Pending& call : calls) {
    EXPECT_THROW(call.wait(), PeerError);
  }
  ASSERT_EQ(limits.size(), 3U);
  EXPECT_GT(limits[0], limits[1]);
  EXPECT_GT(limits[1], limits[2]);
}

// In a world of one the call is the stream's own work, which knows nothing of its memory's owner.
TEST(GroupStream, KeepAliveIsHeldUntilTheStreamHasDoneTheWork) {
  const auto device = late(LateMode::kLazy, 0);
  GroupOptions group_options;
  group_options.device = device.get();
  Group group(make_solo_backend(device.get()), "alone", {0}, group_options);
  auto source = std::make_shared<std::vector<float>>(kStreamNumel, 7.0F);
  std::vector<float> full(kStreamNumel, 0.0F);
  const std::weak_ptr<std::vector<float>> watched = source;
  CallOptions options;
  options.stream = &device->stream(StreamKind::kGather);
  options.keep_alive = source;
  const Gather gather{source->data(), full.data(), kStreamNumel, DType::kFloat32};
  const Pending gathered = group.start_all_gather({&gather, 1}, options);
  source.reset();
  options.keep_alive.reset();
  EXPECT_FALSE(watched.expired());
  gathered.wait();
  EXPECT_EQ(full.back(), 7.0F);
  group.start_barrier(options).wait();
  EXPECT_TRUE(watched.expired());
}

// There is no thread to wait for the input, so its stream must.
TEST(GroupStream, AWorldOfOneOrdersItsStreamBehindALateInput) {
  const auto device = late(LateMode::kRandom, 0);
  GroupOptions group_options;
  group_options.device = device.get();
  Group group(make_solo_backend(device.get()), "alone", {0}, group_options);
  std::vector<float> source(kStreamNumel, 0.0F);
  std::vector<float> full(kStreamNumel, 0.0F);
  const auto input = std::make_shared<CountedPending>();
  CallOptions options;
  options.stream = &device->stream(StreamKind::kGather);
  options.ready = Pending(input);
  const Gather gather{source.data(), full.data(), kStreamNumel, DType::kFloat32};
  const Pending gathered = group.start_all_gather({&gather, 1}, options);
  EXPECT_EQ(input->num_waits(), 0);
  std::fill(source.begin(), source.end(), 7.0F);
  input->succeed();
  gathered.wait();
  EXPECT_EQ(full.back(), 7.0F);
}

TEST(GroupStream, AFailedStreamFailsTheCall) {
  run_ranks(1, [&](Group& group) {
    const auto device = late(LateMode::kLazy, 0);
    device::Stream& read = device->stream(StreamKind::kRead);
    std::ignore = read.enqueue([] { throw CommError("the disk is gone"); });
    CallOptions behind;
    behind.stream = &read;
    float value = 1;
    float copy = 0;
    const Gather gather{&value, &copy, 1, DType::kFloat32};
    EXPECT_THROW(group.start_all_gather({&gather, 1}, behind).wait(), CommError);
  });
}

}  // namespace
}  // namespace tessera::comm
