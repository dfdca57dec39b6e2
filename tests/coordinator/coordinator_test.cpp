// Uses see the right values, at the cost that the plan says, whatever the options, the rank count
// and the device. Faults and departures: coordinator_departure_test.cpp.
#include "tessera/coordinator/coordinator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::coordinator {
namespace {

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

class CoordinatorOn : public testing::TestWithParam<DeviceChoice> {
 protected:
  const bool is_cpu_ = GetParam() == DeviceChoice::kCpu;
};

TEST_P(CoordinatorOn, UsesSeeTheUpdatedValuesAtThePlannedCost) {
  for (const CoordinatorOptions& options : all_option_combinations()) {
    on_ranks(is_cpu_ ? std::vector{1, 2, 3, 4} : std::vector{1, 3}, mixed_model(), options,
             GetParam(), [](auto& rank) { rank.train_at_planned_cost(); });
  }
}

TEST_P(CoordinatorOn, UsesMayOverlap) {
  for (const CoordinatorOptions& options : all_option_combinations()) {
    on_ranks(is_cpu_ ? std::vector{1, 3} : std::vector{2}, mixed_model(), options, GetParam(),
             [](auto& rank) {
               for (int step = 0; step < 3; ++step) {
                 rank.train_overlapping();
                 rank.end_step_and_update();
               }
               EXPECT_EQ(rank.coordinator().trace_mode(),
                         rank.num_ranks() == 1 ? TraceMode::kRecord : TraceMode::kComplete);
             });
  }
}

TEST_P(CoordinatorOn, NothingGatheredBeforeShardsWereWrittenFromOutsideIsUsed) {
  Model model = mixed_model();
  on_ranks({1, 3}, model, make_options(1 << 12, 1 << 14, 0, 64), GetParam(), [&](auto& rank) {
    for (int round = 0; round < 3; ++round) {
      for (int step = 0; step < 2; ++step) {
        rank.train();
        rank.end_step_and_update();
      }
      rank.coordinator().forget_copies();
      EXPECT_EQ(rank.coordinator().unused_bytes(), 0);
      rank.update();  // as a load does
    }
    rank.train();
    rank.end_step_and_update();
  });
}

// Ranks of `num_hosts` hosts, host by host; shards are numbered by local rank first.
TEST_P(CoordinatorOn, GathersInTwoPhasesBringEveryShardToItsPlace) {
  struct Hosts {
    int num_hosts;
    int num_local;
  };
  for (const Hosts hosts : {Hosts{2, 2}, Hosts{3, 2}, Hosts{2, 1}, Hosts{1, 3}}) {
    run_ranks(hosts.num_hosts * hosts.num_local, [&](Group& world) {
      const int host = world.rank() / hosts.num_local;
      const int local = world.rank() % hosts.num_local;
      const auto group = world.split_by({0, local * hosts.num_hosts + host}, "shards", {});
      const auto across = world.split(local, "across");
      const auto inside = world.split(host, "inside");
      CoordinatorFixture rank(*group, mixed_model(), make_options(1 << 12, 1 << 14, 0, 64),
                              GetParam(), nullptr, {across.get(), inside.get()});
      const std::uint64_t sent = group->wire_bytes().payload;
      for (int step = 0; step < 3; ++step) {
        rank.train();
        rank.end_step_and_update();
      }
      EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
      EXPECT_EQ(group->wire_bytes().payload, sent) << "something was gathered in one phase";
      EXPECT_EQ(inside->wire_bytes().payload > 0, hosts.num_local > 1);
      EXPECT_EQ(across->wire_bytes().payload > 0, hosts.num_hosts > 1);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CoordinatorOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

constexpr int kEightLayers = 8;

TEST(Coordinator, ALateEndInBackwardHoldsPrefetchesBackInsideTheLimit) {
  on_ranks({2}, equal_layers(kEightLayers, kLayerNumel),
           make_options(kLayerBytes, 3 * kLayerBytes, kUnlimitedBytes, 0), [&](auto& rank) {
             for (int step = 0; step < 3; ++step) {
               std::ignore = rank.take_stats();
               for (UnitId unit = 0; unit < kEightLayers; ++unit) {
                 rank.run({unit}, Phase::kForward);
               }
               for (UnitId unit = kEightLayers; unit-- > 0;) {
                 rank.begin(unit, Phase::kBackward);
                 if (unit + 1 < kEightLayers) {
                   rank.end(unit + 1, Phase::kBackward);
                 }
               }
               rank.end(0, Phase::kBackward);
               rank.end_step_and_update();
             }
             const CoordinatorStats stats = rank.take_stats();
             EXPECT_LE(stats.full_bytes_peak, 4 * kLayerBytes)
                 << "the limit and the use that ends late";
             EXPECT_EQ(stats.num_gathers, 16U - 3U);
             EXPECT_EQ(stats.prefetch_misses, 0U) << "held back, but still ahead of their uses";
             EXPECT_EQ(stats.arena_overflows, 0U);
           });
}

TEST(Coordinator, RanksThatEndTheirUsesAtOtherMomentsGatherInTheSameOrder) {
  // While the large layer 2 runs there is room for 4, but not on ranks where 1 has not ended.
  // They hold it back, and start it as it is: a rank that gathered it on demand instead would be
  // found out.
  Model model = equal_layers(kEightLayers, kLayerNumel);
  model.numels[2] = 2 * kLayerNumel;
  on_ranks({3}, model, make_options(2 * kLayerBytes, 4 * kLayerBytes, 0, 0), [&](auto& rank) {
    std::vector<Use> uses;
    for (UnitId unit = 0; unit < kEightLayers; ++unit) {
      uses.push_back({unit, Phase::kBackward});
    }
    for (int step = 0; step < 3; ++step) {
      for (const Use& use : uses) {
        rank.begin(use.unit, use.phase);
        if (rank.rank() == 0) {
          rank.end(use.unit, use.phase);
        }
      }
      for (UnitId unit = 0; unit < kEightLayers && rank.rank() > 0; ++unit) {
        rank.end(unit, Phase::kBackward);
      }
      rank.end_step_and_update();
    }
    EXPECT_EQ(rank.expected_plan(uses).uses[2].prefetch, (std::vector<GatherList>{{4}}));
  });
}

TEST(Coordinator, PersistentParametersAreGatheredOncePerStepWithoutCallsOfTheirOwn) {
  Model model = equal_layers(4, kLayerNumel);
  for (int i = 0; i < 4; ++i) {
    model.numels.push_back(8);
    model.units[static_cast<std::size_t>(i)].push_back(4 + i);
  }
  on_ranks({2}, model, make_options(0, 2 * (kLayerBytes + 32) + 4 * 32, 0, 64), [&](auto& rank) {
    for (int step = 0; step < 3; ++step) {
      std::ignore = rank.take_stats();
      rank.train();
      EXPECT_EQ(rank.coordinator().full_bytes(), 4 * 32);
      EXPECT_EQ(rank.params()[5].state(), shard::ParamState::kAvailable);
      const CoordinatorStats stats = rank.take_stats();
      // The recorded step does not know yet what comes again soon: two layers stay at the turn.
      EXPECT_EQ(stats.num_gathers, step == 0 ? 8U : 6U);
      EXPECT_EQ(stats.prefetch_misses, stats.num_gathers + 4);
      rank.end_step_and_update();
    }
  });
}

TEST(Coordinator, TakesItsMemoryFromOneArenaOfKnownSize) {
  for (const std::int64_t limit : {std::int64_t{0}, 2 * kLayerBytes, kUnlimitedBytes}) {
    on_ranks({2}, equal_layers(4, kLayerNumel),
             make_options(kLayerBytes, limit, kUnlimitedBytes, 0), [&](auto& rank) {
               EXPECT_EQ(rank.coordinator().arena_bytes(), 0U) << "made at the first use";
               for (int step = 0; step < 3; ++step) {
                 rank.train();
                 rank.end_step_and_update();
               }
               const std::int64_t layer = (kLayerBytes + 255) / 256 * 256;
               const std::int64_t beside = limit == 0 ? 4 * (layer - kLayerBytes)
                                           : limit == 2 * kLayerBytes
                                               ? 2 * kLayerBytes + 4 * (layer - kLayerBytes)
                                               : 4 * layer;
               EXPECT_EQ(rank.coordinator().arena_bytes(),
                         static_cast<std::size_t>(beside + layer));
               EXPECT_EQ(rank.take_stats().arena_overflows, 0U);
             });
  }
}

TEST(Coordinator, AnExternalParameterIsThereForTheUnitThatNamedIt) {
  on_ranks({2}, equal_layers(3, kLayerNumel), make_options(0, 0, 0, 0), [&](auto& rank) {
    rank.coordinator().add_external(2, 0);
    rank.coordinator().add_external(2, 0);  // twice is once
    rank.begin(2, Phase::kForward);
    EXPECT_EQ(rank.params()[0].state(), shard::ParamState::kAvailable);
    EXPECT_EQ(rank.params()[0].num_users(), 1);
    rank.expect_right_values(0);
    EXPECT_EQ(rank.take_stats().num_gathers, 1U);
    rank.end(2, Phase::kForward);
    EXPECT_EQ(rank.params()[0].state(), shard::ParamState::kReleased);
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
    CoordinatorFixture rank(group, equal_layers(1, kLayerNumel), make_options(0, 0),
                            DeviceChoice::kCpu, group.rank() == 0 ? &clock : nullptr);
    if (rank.rank() == 1) {
      // Rank 0's gather cannot be done before this rank has come to it.
      ASSERT_EQ(waited.wait_for(std::chrono::minutes(2)), std::future_status::ready);
    }
    rank.run({0}, Phase::kForward);
    if (rank.rank() == 0) {
      const CoordinatorStats stats = rank.take_stats();
      EXPECT_EQ(stats.exposed_wait_s, 1.0);
      EXPECT_EQ(stats.forward.demand_wait_s, 1.0);
      EXPECT_EQ(stats.forward.demand_submit_s, 1.0);
      EXPECT_EQ(rank.coordinator().report(0).forward.demand_wait_s, 1.0);
      EXPECT_EQ(rank.take_stats().exposed_wait_s, 0.0);
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
