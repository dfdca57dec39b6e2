// Uses see the right values, at the cost that the plan says, whatever the options, the rank count
// and the device. Faults and departures: coordinator_departure_test.cpp.
#include "tessera/coordinator/coordinator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/option_table.h"
#include "testing/thread_backend.h"
#include "tests/coordinator/coordinator_world.h"
#include "tests/support/sizes.h"

namespace tessera::coordinator {
namespace {

using comm::Group;
using comm::run_ranks;

std::vector<CoordinatorOptions> all_option_combinations() {
  std::vector<CoordinatorOptions> all;
  for (const std::int64_t bucket : {std::int64_t{0}, std::int64_t{1300}, kUnlimitedBytes}) {
    for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{2000}, kUnlimitedBytes}) {
      for (const std::int64_t reuse : {std::int64_t{0}, kUnlimitedBytes}) {
        for (const std::int64_t persist : {std::int64_t{-1}, std::int64_t{200}}) {
          all.push_back(make_options(bucket, limit, reuse, persist));
          all.back().budgets.merge_below_bytes = limit == 2000 ? 1000 : 0;
        }
      }
    }
  }
  if (support::kIsSanitized) {  // each value of each option, but not each with each
    std::vector<CoordinatorOptions> some;
    for (std::size_t i = 0; i < all.size(); i += 5) {
      some.push_back(all[i]);
    }
    return some;
  }
  return all;
}

// Four steps with updates between them; the last two follow the plan exactly.
void train_and_count(Group& group, const CoordinatorOptions& options, DeviceChoice choice) {
  RankWorld world(group, mixed_model(), options, choice);
  const std::vector<Use> uses = RankWorld::uses_of_step(world.model().units.size());
  world.run_step();
  EXPECT_EQ(world.coordinator().trace_mode(), TraceMode::kRecord);
  world.end_step_and_update();
  EXPECT_EQ(world.coordinator().trace_mode(),
            group.size() == 1 ? TraceMode::kRecord : TraceMode::kComplete);
  world.run_step();
  world.end_step_and_update();
  std::ignore = world.coordinator().take_stats();

  const std::uint64_t sent_before = group.wire_bytes().payload;
  for (int step = 0; step < 2; ++step) {
    world.run_step();
    world.end_step_and_update();
  }
  const CoordinatorStats stats = world.coordinator().take_stats();
  EXPECT_EQ(stats.num_uses, 2 * uses.size());
  EXPECT_EQ(stats.prefetch_drops, 0U);
  if (group.size() == 1) {
    EXPECT_EQ(stats.num_gathers, 0U);
    EXPECT_EQ(stats.full_bytes_peak, world.largest_unit_bytes());
    EXPECT_EQ(world.coordinator().arena_bytes(), 0U);
    return;
  }
  const PrefetchPlan plan = world.expected_plan(uses);
  const PlanSums sums = sums_of(plan, world.params());
  EXPECT_EQ(stats.num_gathers, 2 * sums.num_gathers);
  EXPECT_EQ(stats.gathered_bytes, 2 * sums.gathered_bytes);
  EXPECT_EQ(stats.prefetch_misses, 2 * sums.num_demanded);
  EXPECT_EQ(stats.prefetch_hits, 2 * sums.num_prefetched);
  EXPECT_EQ(stats.full_bytes_peak, plan.peak_bytes);
  EXPECT_LE(stats.full_bytes_peak,
            std::max(world.largest_unit_bytes(), options.budgets.live_limit_bytes));
  EXPECT_EQ(stats.arena_misplaced, 0U) << "uses follow each other: every gather gets its place";
  const auto num_ranks = static_cast<std::uint64_t>(group.size());
  EXPECT_EQ(group.wire_bytes().payload - sent_before,
            stats.gathered_bytes / num_ranks * (num_ranks - 1));
}

class CoordinatorOn : public testing::TestWithParam<DeviceChoice> {};

TEST_P(CoordinatorOn, UsesSeeTheUpdatedValuesAtThePlannedCost) {
  const bool is_cpu = GetParam() == DeviceChoice::kCpu;
  for (const int num_ranks : is_cpu ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{1, 3}) {
    run_ranks(num_ranks, [&](Group& group) {
      for (const CoordinatorOptions& options : all_option_combinations()) {
        train_and_count(group, options, GetParam());
      }
    });
  }
}

// Units inside units, a backward that ends late, a forward that is run again inside a backward.
void run_overlapping_step(RankWorld& world) {
  const auto last = static_cast<UnitId>(world.model().units.size() - 1);
  world.begin(0, Phase::kForward);
  for (UnitId unit = 1; unit <= last; ++unit) {
    world.begin(unit, Phase::kForward);
    world.end(unit, Phase::kForward);
  }
  world.end(0, Phase::kForward);
  for (UnitId unit = last; unit > 0; --unit) {
    world.begin(unit, Phase::kBackward);
    world.begin(unit, Phase::kForward);
    world.end(unit, Phase::kForward);
    if (unit < last) {
      world.end(unit + 1, Phase::kBackward);
    }
  }
  world.begin(0, Phase::kBackward);
  world.end(1, Phase::kBackward);
  world.end(0, Phase::kBackward);
}

TEST_P(CoordinatorOn, UsesMayOverlap) {
  const bool is_cpu = GetParam() == DeviceChoice::kCpu;
  for (const int num_ranks : is_cpu ? std::vector<int>{1, 3} : std::vector<int>{2}) {
    run_ranks(num_ranks, [&](Group& group) {
      for (const CoordinatorOptions& options : all_option_combinations()) {
        RankWorld world(group, mixed_model(), options, GetParam());
        for (int step = 0; step < 3; ++step) {
          run_overlapping_step(world);
          world.end_step_and_update();
        }
        EXPECT_EQ(world.coordinator().trace_mode(),
                  num_ranks == 1 ? TraceMode::kRecord : TraceMode::kComplete);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CoordinatorOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

constexpr int kEightLayers = 8;

TEST(Coordinator, ALateEndInBackwardHoldsPrefetchesBackInsideTheLimit) {
  run_ranks(2, [](Group& group) {
    RankWorld world(group, equal_layers(kEightLayers, kLayerNumel),
                    make_options(kLayerBytes, 3 * kLayerBytes, kUnlimitedBytes, 0));
    for (int step = 0; step < 3; ++step) {
      std::ignore = world.coordinator().take_stats();
      for (UnitId unit = 0; unit < kEightLayers; ++unit) {
        world.begin(unit, Phase::kForward);
        world.end(unit, Phase::kForward);
      }
      for (UnitId unit = kEightLayers; unit-- > 0;) {
        world.begin(unit, Phase::kBackward);
        if (unit + 1 < kEightLayers) {
          world.end(unit + 1, Phase::kBackward);
        }
      }
      world.end(0, Phase::kBackward);
      world.end_step_and_update();
    }
    const CoordinatorStats stats = world.coordinator().take_stats();
    EXPECT_LE(stats.full_bytes_peak, 4 * kLayerBytes) << "the limit and the use that ends late";
    EXPECT_EQ(stats.num_gathers, 16U - 3U);
    EXPECT_EQ(stats.prefetch_misses, 0U) << "held back, but still ahead of their uses";
    EXPECT_EQ(stats.arena_overflows, 0U);
  });
}

TEST(Coordinator, RanksThatEndTheirUsesAtOtherMomentsGatherInTheSameOrder) {
  run_ranks(3, [](Group& group) {
    // While the large layer 2 runs there is room for 4, but not on ranks where 1 has not ended.
    // They hold it back, and start it as it is: a rank that gathered it on demand instead would be
    // found out.
    Model model = equal_layers(kEightLayers, kLayerNumel);
    model.numels[2] = 2 * kLayerNumel;
    RankWorld world(group, model, make_options(2 * kLayerBytes, 4 * kLayerBytes, 0, 0));
    std::vector<Use> uses;
    for (UnitId unit = 0; unit < kEightLayers; ++unit) {
      uses.push_back({unit, Phase::kBackward});
    }
    for (int step = 0; step < 3; ++step) {
      for (const Use& use : uses) {
        world.begin(use.unit, use.phase);
        if (group.rank() == 0) {
          world.end(use.unit, use.phase);
        }
      }
      for (UnitId unit = 0; unit < kEightLayers && group.rank() > 0; ++unit) {
        world.end(unit, Phase::kBackward);
      }
      world.end_step_and_update();
    }
    EXPECT_EQ(world.expected_plan(uses).uses[2].prefetch, (std::vector<GatherList>{{4}}));
  });
}

TEST(Coordinator, PersistentParametersAreGatheredOncePerStepWithoutCallsOfTheirOwn) {
  run_ranks(2, [](Group& group) {
    Model model = equal_layers(4, kLayerNumel);
    for (int i = 0; i < 4; ++i) {
      model.numels.push_back(8);
      model.units[static_cast<std::size_t>(i)].push_back(4 + i);
    }
    RankWorld world(group, model, make_options(0, 2 * (kLayerBytes + 32) + 4 * 32, 0, 64));
    for (int step = 0; step < 3; ++step) {
      std::ignore = world.coordinator().take_stats();
      world.run_step();
      EXPECT_EQ(world.coordinator().full_bytes(), 4 * 32);
      EXPECT_EQ(world.params()[5].state(), shard::ParamState::kAvailable);
      const CoordinatorStats stats = world.coordinator().take_stats();
      // The recorded step does not know yet what comes again soon: two layers stay at the turn.
      EXPECT_EQ(stats.num_gathers, step == 0 ? 8U : 6U);
      EXPECT_EQ(stats.prefetch_misses, stats.num_gathers + 4);
      world.end_step_and_update();
    }
  });
}

TEST(Coordinator, TakesItsMemoryFromOneArenaOfKnownSize) {
  run_ranks(2, [](Group& group) {
    for (const std::int64_t limit : {std::int64_t{0}, 2 * kLayerBytes, kUnlimitedBytes}) {
      RankWorld world(group, equal_layers(4, kLayerNumel),
                      make_options(kLayerBytes, limit, kUnlimitedBytes, 0));
      EXPECT_EQ(world.coordinator().arena_bytes(), 0U) << "made at the first use";
      for (int step = 0; step < 3; ++step) {
        world.run_step();
        world.end_step_and_update();
      }
      const std::int64_t layer = (kLayerBytes + 255) / 256 * 256;
      const std::int64_t beside = limit == 0 ? 4 * (layer - kLayerBytes)
                                  : limit == 2 * kLayerBytes
                                      ? 2 * kLayerBytes + 4 * (layer - kLayerBytes)
                                      : 4 * layer;
      EXPECT_EQ(world.coordinator().arena_bytes(), static_cast<std::size_t>(beside + layer));
      EXPECT_EQ(world.coordinator().take_stats().arena_overflows, 0U);
    }
  });
}

TEST(Coordinator, AnExternalParameterIsThereForTheUnitThatNamedIt) {
  run_ranks(2, [](Group& group) {
    RankWorld world(group, equal_layers(3, kLayerNumel), make_options(0, 0, 0, 0));
    world.coordinator().add_external(2, 0);
    world.coordinator().add_external(2, 0);  // twice is once
    world.begin(2, Phase::kForward);
    EXPECT_EQ(world.params()[0].state(), shard::ParamState::kAvailable);
    EXPECT_EQ(world.params()[0].num_users(), 1);
    world.expect_right_values(0);
    EXPECT_EQ(world.coordinator().take_stats().num_gathers, 1U);
    world.end(2, Phase::kForward);
    EXPECT_EQ(world.params()[0].state(), shard::ParamState::kReleased);
  });
}

// Each look at it is a second later; the one that begins the wait is made known.
class LookedAtClock final : public Clock {
 public:
  explicit LookedAtClock(std::promise<void>& looked_at) : looked_at_(looked_at) {}
  std::int64_t now_ns() const override {
    const std::int64_t look = num_looks_.fetch_add(1);
    if (look == 2) {  // after two for the start of the call
      looked_at_.set_value();
    }
    return look * 1'000'000'000;
  }

 private:
  std::promise<void>& looked_at_;
  mutable std::atomic<std::int64_t> num_looks_{0};
};

TEST(Coordinator, CountsTheTimeThatAUseWaitedForItsGather) {
  std::promise<void> is_waiting;
  std::future<void> waited = is_waiting.get_future();
  const LookedAtClock clock(is_waiting);
  run_ranks(2, [&](Group& group) {
    const CoordinatorOptions options = make_options(0, 0, 0, 0);
    RankWorld world(group, equal_layers(1, kLayerNumel), options, DeviceChoice::kCpu,
                    group.rank() == 0 ? &clock : nullptr);
    if (group.rank() == 1) {
      // Rank 0's gather cannot be done before this rank has come to it.
      ASSERT_EQ(waited.wait_for(std::chrono::minutes(2)), std::future_status::ready);
    }
    world.begin(0, Phase::kForward);
    world.end(0, Phase::kForward);
    if (group.rank() == 0) {
      const CoordinatorStats stats = world.coordinator().take_stats();
      EXPECT_EQ(stats.exposed_wait_s, 1.0);
      EXPECT_EQ(stats.forward.demand_wait_s, 1.0);
      EXPECT_EQ(stats.forward.demand_submit_s, 1.0);
      EXPECT_EQ(world.coordinator().report(0).forward.demand_wait_s, 1.0);
      EXPECT_EQ(world.coordinator().take_stats().exposed_wait_s, 0.0);
    }
  });
}

TEST(CoordinatorOptions, ComeFromTheConfig) {
  Config config;
  config.set("prefetch.bucket_bytes", "1MiB");
  config.set("prefetch.max_inflight", 7);
  config.set("live.limit_bytes", "3MiB");
  config.set("live.reuse_distance_bytes", "unlimited");
  config.set("persist.param_bytes", "5KiB");
  config.set("persist.model_bytes", "6KiB");
  const CoordinatorOptions options = CoordinatorOptions::from(config);
  EXPECT_EQ(options.budgets.bucket_bytes, 1 << 20);
  EXPECT_EQ(options.budgets.max_inflight, 7);
  EXPECT_EQ(options.budgets.live_limit_bytes, 3 << 20);
  EXPECT_EQ(options.budgets.reuse_distance_bytes, kUnlimitedBytes);
  EXPECT_EQ(options.persist_param_bytes, 5 << 10);
  EXPECT_EQ(options.persist_model_bytes, 6 << 10);
}

}  // namespace
}  // namespace tessera::coordinator
