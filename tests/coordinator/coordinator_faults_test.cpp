// When a step does not go as the last one did: another order of uses, an early end, an exception,
// a failed gather, an illegal move.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"

namespace tessera::coordinator {
namespace {

using shard::ParamState;

CoordinatorOptions two_ahead() {
  CoordinatorOptions options = make_options(kLayerBytes, kUnlimitedBytes, kUnlimitedBytes);
  options.budgets.max_inflight = 2;
  return options;
}

class TraceMissOn : public testing::TestWithParam<DeviceChoice> {};

TEST_P(TraceMissOn, AnotherOrderDropsWhatWasPrefetchedAndGoesOn) {
  on_ranks({2, 3, 4}, six_layers(), two_ahead(), GetParam(), [&](auto& rank) {
    for (int step = 0; step < 2; ++step) {
      rank.run(kInOrder);
      rank.end_step_and_update();
    }
    std::ignore = rank.take_stats();

    // After 0 and 1 the plan has prefetched 2 and 3. 3 comes instead of 2.
    rank.run({0, 1, 3});
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kInvalid);
    EXPECT_EQ(rank.coordinator().full_bytes(), 0) << "2 is gone, the others were used";
    CoordinatorStats stats = rank.take_stats();
    EXPECT_EQ(stats.prefetch_drops, 1U);
    EXPECT_EQ(stats.prefetch_hits, 3U) << "0, 1, and 3, which had been prefetched for later";
    EXPECT_EQ(stats.prefetch_misses, 0U);
    rank.run({2, 5, 4, 0});
    EXPECT_EQ(rank.take_stats().prefetch_misses, 4U);
    rank.end_step_and_update();

    // The odd order was expected to come again; the usual one is known as well, and takes over.
    std::ignore = rank.take_stats();
    rank.run(kInOrder);
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
    stats = rank.take_stats();
    EXPECT_EQ(stats.prefetch_hits, 6U);
    EXPECT_EQ(stats.prefetch_misses, 0U);
    rank.end_step_and_update();

    if (rank.rank() == 0) {
      ASSERT_EQ(rank.log_lines().size(), 1U);
      EXPECT_NE(rank.log_lines()[0].find("execution order changed at use 2: expected the forward "
                                         "of unit 'u2', got the forward of unit 'u3'"),
                std::string::npos)
          << rank.log_lines()[0];
    } else {
      EXPECT_TRUE(rank.log_lines().empty());
    }
  });
}

TEST_P(TraceMissOn, AStepThatEndsEarlyOrLateKeepsItsValues) {
  on_ranks({3}, six_layers(), two_ahead(), GetParam(), [&](auto& rank) {
    rank.run(kInOrder);
    rank.end_step_and_update();
    std::ignore = rank.take_stats();
    rank.run({0, 1});  // early: 2 and 3 are in flight
    rank.end_step_and_update();
    EXPECT_EQ(rank.take_stats().prefetch_drops, 2U);
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
    rank.run(kInOrder);
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
    rank.run({2, 2});  // late: the trace has ended
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kInvalid);
    rank.end_step_and_update();
    rank.run(kInOrder);
    rank.end_step_and_update();
    if (rank.rank() == 0) {
      ASSERT_EQ(rank.log_lines().size(), 1U);
      EXPECT_NE(rank.log_lines()[0].find("expected the end of the pass"), std::string::npos);
    }
  });
}

TEST_P(TraceMissOn, AfterAnExceptionTheNextStepRecordsAnew) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    Model model = six_layers();
    model.numels.push_back(4);  // persists
    model.units[0].push_back(kLayers);
    CoordinatorOptions options = two_ahead();
    options.persist_param_bytes = 64;
    options.persist_model_bytes = 64;
    on_ranks({num_ranks}, model, options, GetParam(), [&](auto& rank) {
      rank.run(kInOrder);
      rank.end_step_and_update();

      rank.begin(0, Phase::kForward);
      rank.begin(1, Phase::kForward);
      rank.coordinator().release_all();
      EXPECT_EQ(rank.params()[kLayers].state(),
                rank.num_ranks() == 1 ? ParamState::kReleased : ParamState::kAvailable);
      for (int id = 0; id < kLayers; ++id) {
        EXPECT_EQ(rank.params()[id].state(), ParamState::kReleased);
        EXPECT_EQ(rank.params()[id].num_users(), 0);
      }
      EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kRecord);
      EXPECT_THROW(rank.coordinator().end_use(0, Phase::kForward), InternalError);
      rank.coordinator().release_all();  // again does no harm

      // Shards have not changed: what persists is still right.
      rank.run(kInOrder);
      rank.end_step_and_update();
      std::ignore = rank.take_stats();
      rank.run(kInOrder);
      EXPECT_EQ(rank.take_stats().prefetch_hits, rank.num_ranks() == 1 ? 0U : 7U);
      rank.end_step_and_update();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TraceMissOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST(CoordinatorFaults, TheStepEndsWhenNoDroppedGatherReadsShardsAnyMore) {
  std::atomic<bool> ends_the_step{false};
  std::atomic<bool> has_arrived{false};
  CoordinatorOptions one_ahead = two_ahead();
  one_ahead.budgets.max_inflight = 1;
  on_ranks({2}, equal_layers(2, kLayerNumel), one_ahead, [&](auto& rank) {
    const auto run_early_step = [&] {
      rank.run({0});  // prefetches 1
      ends_the_step = true;
      rank.coordinator().end_step();
      EXPECT_TRUE(has_arrived) << "the other rank has not read this one's shard";
    };
    // Rank 1 takes part in the prefetch by hand, to be late for it.
    const auto follow = [&] {
      while (!ends_the_step) {
        std::this_thread::yield();
      }
      has_arrived = true;
      const int id = 1;
      const shard::Param& param = rank.params()[id];
      std::vector<float> full(static_cast<std::size_t>(param.layout().padded_numel()));
      const comm::Gather tensor{param.shard(), full.data(), param.layout().shard_numel(),
                                param.layout().dtype(), param.name()};
      const std::string unit = rank.coordinator().unit_name(id);
      comm::CallOptions options;
      options.label = {unit, param.name()};
      options.content_hash = comm::hash_bytes(&id, sizeof(id), 0);
      const device::Pending gathered = rank.group().start_all_gather({&tensor, 1}, options);
      // The uses of the step are compared at its end.
      const std::int32_t use[2] = {0, static_cast<std::int32_t>(Phase::kForward)};
      comm::Gather named;
      named.name = "u0 (p0)";
      options.label = {"the uses of this step", {}};
      options.content_hash = comm::hash_bytes(use, sizeof(use), 0);
      rank.group().start_all_gather({&named, 1}, options).wait();
      gathered.wait();
    };
    rank.run({0, 1});
    rank.end_step_and_update();
    rank.rank() == 0 ? run_early_step() : follow();
  });
}

comm::ThreadWorldOptions two_on_streams() {
  comm::ThreadWorldOptions ranks;
  ranks.num_ranks = 2;
  ranks.on_streams = true;
  return ranks;
}

// A call whose stream stands still is ahead of the comparison of uses, and calls end in order.
TEST(CoordinatorFaults, OnStreamsTheStepEndsWithoutAWaitForTheDevice) {
  run_ranks(two_on_streams(), {}, [](Group& group) {
    CoordinatorFixture rank(group, six_layers(), two_ahead(), DeviceChoice::kRandom);
    rank.run(kInOrder);
    const auto opened = std::make_shared<Completion>();
    const auto is_late = std::make_shared<std::atomic<bool>>(false);
    device::Stream& stream = rank.device().stream(device::StreamKind::kReduce);
    std::ignore = stream.enqueue([opened, is_late] {
      if (!opened->wait_for(std::chrono::seconds(60))) {
        *is_late = true;  // a test that fails must not hang
      }
    });
    std::vector<float> numbers(8, 1.0F);
    comm::CallOptions options;
    options.stream = &stream;
    const Pending call =
        group.start_all_reduce(numbers.data(), 8, DType::kFloat32, comm::Reduction::kSum, options);
    rank.coordinator().end_step();
    group.wait_agreed();
    EXPECT_FALSE(call.done());
    EXPECT_FALSE(*is_late);
    opened->succeed();
    call.wait();
  });
}

TEST(CoordinatorFaults, OnStreamsOtherUsesAreNamedBeforeAnythingIsUpdated) {
  run_ranks(two_on_streams(), {}, [](Group& group) {
    CoordinatorFixture rank(group, six_layers(), two_ahead(), DeviceChoice::kRandom);
    rank.run({0});
    if (group.rank() == 0) {
      rank.coordinator().end_step();
    } else {  // as of another unit that was held
      comm::Gather named;
      named.name = "u7 (p7)";
      comm::CallOptions options;
      options.label = {"the uses of this step", {}};
      options.content_hash = 7;
      std::ignore = group.start_all_gather({&named, 1}, options);
    }
    try {
      group.wait_agreed();
      ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
    } catch (const comm::MismatchError& error) {
      EXPECT_NE(std::string(error.what()).find("u7 (p7)"), std::string::npos) << error.what();
    }
    rank.coordinator().release_all();
  });
}

TEST(CoordinatorFaults, AFailedGatherIsThrownAndCanBeCleanedUp) {
  for (const std::uint64_t call : {std::uint64_t{1}, std::uint64_t{8}, std::uint64_t{9}}) {
    comm::ThreadWorldOptions thread_world;
    thread_world.num_ranks = 2;
    comm::ThreadFault fault;
    fault.rank = 1;
    fault.call = call;
    thread_world.fault = fault;
    comm::GroupOptions group_options;
    group_options.heartbeat = std::chrono::milliseconds(20);  // how soon the other rank hears of it
    run_ranks(thread_world, group_options, [&](Group& group) {
      CoordinatorFixture rank(group, six_layers(), two_ahead());
      std::string problem;
      try {
        for (int step = 0; step < 2; ++step) {
          rank.run(kInOrder);
          rank.end_step_and_update();
        }
        FAIL() << "the failed call was not noticed";
      } catch (const CommError& error) {
        problem = error.what();
      }
      EXPECT_NE(problem, "");
      rank.coordinator().release_all();
      EXPECT_EQ(rank.coordinator().full_bytes(), 0);
      for (int id = 0; id < kLayers; ++id) {
        EXPECT_EQ(rank.params()[id].state(), ParamState::kReleased);
      }
      EXPECT_THROW(rank.begin(0, Phase::kForward), CommError) << "never as if nothing had been";
      EXPECT_THROW(rank.begin(0, Phase::kForward), CommError);
      rank.coordinator().release_all();
    });
  }
}

void expect_internal_error(const std::function<void()>& move,
                           const std::vector<std::string>& words) {
  try {
    move();
    FAIL() << "expected InternalError with '" << words.front() << "'";
  } catch (const InternalError& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

TEST(CoordinatorFaults, IllegalMovesNameUnitAndParameter) {
  on_ranks({1, 2}, equal_layers(2, 10), two_ahead(), [&](auto& rank) {
    Coordinator& coordinator = rank.coordinator();
    expect_internal_error([&] { coordinator.add_unit("odd", {0, 2}); }, {"'odd'", "parameter 2"});
    expect_internal_error([&] { coordinator.add_external(1, -1); }, {"'u1'", "parameter -1"});
    expect_internal_error([&] { coordinator.add_external(9, 0); }, {"unit 9 is not known"});
    expect_internal_error([&] { coordinator.begin_use(-1, Phase::kForward); }, {"unit -1"});
    coordinator.begin_use(0, Phase::kForward);
    expect_internal_error([&] { coordinator.end_use(0, Phase::kBackward); },
                          {"the backward of unit 'u0'", "did not begin", "'p0'"});
    expect_internal_error([&] { coordinator.end_use(1, Phase::kForward); },
                          {"the forward of unit 'u1'", "'p1'"});
    expect_internal_error([&] { coordinator.end_step(); }, {"the forward of unit 'u0'"});
    expect_internal_error([&] { coordinator.add_unit("late", {0}); }, {"'late'", "first use"});
    expect_internal_error([&] { coordinator.add_external(1, 0); }, {"'u1'", "'p0'"});
    coordinator.end_use(0, Phase::kForward);
    EXPECT_EQ(coordinator.unit_name(1), "u1");
    coordinator.end_step();
  });
}

TEST(CoordinatorFaults, ParametersOfAnotherRankCountAreRefused) {
  run_ranks(2, [](Group& group) {
    support::RankFixture three(0, 3);
    const CoordinatorParts parts{group,         three.device(), three.params(),
                                 three.clock(), three.spans(),  three.logger()};
    expect_internal_error([&] { Coordinator coordinator(parts, two_ahead()); },
                          {"3 ranks", "has 2"});
  });
}

TEST(CoordinatorFaults, ACoordinatorThatEndsInsideAUseLeavesItsParametersReleased) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      support::RankFixture rank(group.rank(), group.size());
      const shard::Param& param = rank.add_param(10);
      {
        CoordinatorOptions options = two_ahead();
        options.persist_param_bytes = kUnlimitedBytes;
        Coordinator coordinator(
            {group, rank.device(), rank.params(), rank.clock(), rank.spans(), rank.logger()},
            options);
        coordinator.begin_use(coordinator.add_unit("u", {0}), Phase::kForward);
        EXPECT_NE(rank.shown(0), nullptr);
      }
      EXPECT_EQ(rank.shown(0), nullptr);
      EXPECT_EQ(param.state(), ParamState::kReleased);
      EXPECT_EQ(param.num_users(), 0);
    });
  }
}

}  // namespace
}  // namespace tessera::coordinator
