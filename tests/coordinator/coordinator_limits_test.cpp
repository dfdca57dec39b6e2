// What prefetching promises: hits from the second step on, whatever is run in turn; every limit at
// every event; ranks that disagree are told so before a wrong number is used.
#include <algorithm>
#include <functional>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::coordinator {
namespace {

CoordinatorOptions limited(std::int64_t layers, std::int64_t reuse = 0) {
  return make_options(kLayerBytes, layers * kLayerBytes, reuse);
}

TEST(CoordinatorLimits, SixOfThirtyTwoLayersNeedNoMoreGathersThanTheOptimum) {
  for (const std::int64_t bucket : {kLayerBytes, 2 * kLayerBytes, kUnlimitedBytes}) {
    CoordinatorOptions options = limited(6);
    options.budgets.bucket_bytes = bucket;
    on_ranks({2}, equal_layers(32, kLayerNumel), options, [&](auto& rank) {
      for (int step = 0; step < 4; ++step) {
        std::ignore = rank.take_stats();
        for (const Use& use : rank.uses_of_step()) {
          rank.begin(use.unit, use.phase);
          ASSERT_LE(rank.coordinator().full_bytes(), 6 * kLayerBytes);
          rank.end(use.unit, use.phase);
          ASSERT_LE(rank.coordinator().full_bytes(), 6 * kLayerBytes);
        }
        rank.end_step_and_update();
        const CoordinatorStats stats = rank.take_stats();
        EXPECT_LE(stats.full_bytes_peak, 6 * kLayerBytes);
        EXPECT_EQ(stats.arena_overflows, 0U);
        if (step >= 2) {
          EXPECT_EQ(stats.num_gathers, 58U);
          EXPECT_EQ(stats.prefetch_misses, 0U);
          EXPECT_EQ(stats.prefetch_drops, 0U);
        }
      }
    });
  }
}

TEST(CoordinatorLimits, NothingIsMissedFromTheSecondStepIfTheLimitHoldsTwoUnits) {
  for (const std::int64_t limit : {2, 3, 5}) {
    for (const int micro_batches : {1, 3}) {
      on_ranks({3}, equal_layers(7, kLayerNumel), limited(limit), [&](auto& rank) {
        for (int step = 0; step < 4; ++step) {
          for (int i = 0; i < micro_batches; ++i) {
            rank.train();
          }
          const CoordinatorStats stats = rank.take_stats();
          if (step >= 1) {
            EXPECT_EQ(stats.prefetch_misses, 0U) << "step " << step;
            EXPECT_EQ(stats.backward.misses, 0U);
          }
          if (step >= 2) {
            EXPECT_EQ(stats.prefetch_drops, 0U) << "step " << step;
          }
          rank.end_step_and_update();
        }
      });
    }
  }
}

TEST(CoordinatorLimits, SmallParametersThatPersistLeaveRoomToPrefetch) {
  Model model = equal_layers(6, kLayerNumel);
  for (int i = 0; i < 6; ++i) {
    model.numels.push_back(64);
    model.units[static_cast<std::size_t>(i)].push_back(6 + i);
  }
  CoordinatorOptions options = limited(3);
  options.persist_param_bytes = kUnlimitedBytes;
  options.persist_model_bytes = kUnlimitedBytes;
  on_ranks({2}, model, options, [&](auto& rank) {
    for (int step = 0; step < 4; ++step) {
      rank.train();
      const CoordinatorStats stats = rank.take_stats();
      EXPECT_TRUE(step == 0 || stats.prefetch_misses == 0) << stats.prefetch_misses;
      EXPECT_LE(stats.full_bytes_peak, 3 * kLayerBytes);
      rank.end_step_and_update();
    }
  });
}

TEST(CoordinatorLimits, TrainingAndEvaluationInTurnMissNothing) {
  on_ranks({2}, equal_layers(6, kLayerNumel), limited(3), [&](auto& rank) {
    for (int round = 0; round < 5; ++round) {
      std::ignore = rank.take_stats();
      rank.train();
      rank.end_step_and_update();
      rank.run(rank.all_units(), Phase::kInference);
      rank.run(rank.all_units(), Phase::kInference);
      if (round >= 2) {
        const CoordinatorStats stats = rank.take_stats();
        EXPECT_EQ(stats.prefetch_misses, 0U) << "round " << round;
        EXPECT_EQ(stats.prefetch_drops, 0U) << "round " << round;
      }
    }
  });
}

TEST(CoordinatorLimits, TwoBranchesInTurnMissNothingAndOutOfTurnOneUseAtTheBranch) {
  on_ranks({2}, equal_layers(8, kLayerNumel), limited(3), [&](auto& rank) {
    const std::vector<UnitId> left = {0, 1, 2, 3, 6, 7};
    const std::vector<UnitId> right = {0, 1, 4, 5, 6, 7};
    for (int step = 0; step < 8; ++step) {
      rank.train(step % 2 == 0 ? left : right);
      const CoordinatorStats stats = rank.take_stats();
      if (step >= 4) {
        EXPECT_EQ(stats.prefetch_misses, 0U) << "step " << step;
      }
      rank.end_step_and_update();
    }
    // The same branch three times in a row: nothing foresees that.
    for (int step = 0; step < 3; ++step) {
      rank.train(right);
      const CoordinatorStats stats = rank.take_stats();
      EXPECT_LE(stats.forward.missed_uses + stats.backward.missed_uses, 1U) << "step " << step;
      rank.end_step_and_update();
    }
  });
}

TEST(CoordinatorLimits, TwoForwardsBeforeOneBackwardArePrefetchedLikeAnyOther) {
  on_ranks({2}, equal_layers(5, kLayerNumel), limited(3), [&](auto& rank) {
    for (int step = 0; step < 4; ++step) {
      rank.run(rank.all_units(), Phase::kForward);
      rank.train();
      rank.run({4, 3, 2, 1, 0}, Phase::kBackward);
      const CoordinatorStats stats = rank.take_stats();
      if (step >= 1) {
        EXPECT_EQ(stats.prefetch_misses, 0U) << "step " << step;
        EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
      }
      rank.end_step_and_update();
    }
  });
}

// Random units in a random order that all ranks share; some run inside others.
void run_random_pass(CoordinatorFixture& rank, std::mt19937& random,
                     const std::function<void()>& at_every_event) {
  const auto num_units = static_cast<unsigned>(rank.model().units.size());
  std::vector<Use> open;
  for (unsigned i = 0; i < 3 + random() % 10; ++i) {
    const auto phase = random() % 3 == 0 ? Phase::kBackward : Phase::kForward;
    open.push_back({static_cast<UnitId>(random() % num_units), phase});
    rank.begin(open.back().unit, phase);
    at_every_event();
    while (!open.empty() && random() % 4 > 0) {
      rank.end(open.back().unit, open.back().phase);
      open.pop_back();
      at_every_event();
    }
  }
  for (; !open.empty(); open.pop_back()) {
    rank.end(open.back().unit, open.back().phase);
    at_every_event();
  }
}

TEST(CoordinatorLimits, EveryLimitHoldsAtEveryEventOfRandomPasses) {
  for (unsigned seed = 0; seed < support::rounds(45U, 12U); ++seed) {
    run_ranks(1 + static_cast<int>(seed % 3), [&](Group& group) {
      std::mt19937 random(seed);
      const auto pick = [&](std::initializer_list<std::int64_t> values) {
        return values.begin()[random() % values.size()];
      };
      CoordinatorOptions options;
      options.budgets.bucket_bytes = pick({0, 500, 3000, kUnlimitedBytes});
      options.budgets.merge_below_bytes = pick({0, 1000});
      options.budgets.max_inflight = static_cast<int>(pick({1, 2, 4}));
      options.budgets.live_limit_bytes = pick({0, 1500, 4000, 20000, kUnlimitedBytes});
      options.budgets.reuse_distance_bytes = pick({0, 2000, kUnlimitedBytes});
      options.persist_param_bytes = pick({0, 200});
      options.persist_model_bytes = kUnlimitedBytes;
      options.max_traces = 3;
      CoordinatorFixture rank(group, mixed_model(), options,
                              seed % 2 == 0 ? DeviceChoice::kRandom : DeviceChoice::kCpu);
      Coordinator& coordinator = rank.coordinator();
      const auto check = [&] {
        ASSERT_LE(coordinator.unused_bytes(),
                  std::max(options.budgets.live_limit_bytes, rank.largest_unit_bytes()))
            << "seed " << seed;
        ASSERT_LE(coordinator.num_calls_in_flight(),
                  static_cast<std::size_t>(options.budgets.max_inflight));
      };
      // Few different passes, so that traces are followed, switched and departed from.
      for (int step = 0; step < 12; ++step) {
        const unsigned shape = random() % 4 == 0 ? static_cast<unsigned>(random()) : random() % 3;
        std::mt19937 pass(shape);
        run_random_pass(rank, pass, check);
        if (random() % 3 > 0) {
          rank.end_step_and_update();  // checks that nothing is left
          check();
        }
      }
    });
  }
}

TEST(CoordinatorLimits, ARankThatDivergesIsNamedOnEveryRankBeforeANumberIsUsed) {
  for (const int diverging_step : {0, 100}) {
    on_ranks({3}, equal_layers(4, kLayerNumel), limited(2), [&](auto& rank) {
      std::string message;
      try {
        for (int step = 0; step <= diverging_step; ++step) {
          const bool diverges = step == diverging_step && rank.rank() == 1;
          rank.train(diverges ? std::vector<UnitId>{0, 2, 1, 3} : rank.all_units());
          rank.end_step_and_update();
        }
      } catch (const CommError& error) {
        message = error.what();
      }
      // Values are compared in train(): a wrong one would have failed there.
      for (const char* word : {"rank 1 called", "ranks 0, 2 called", "unit 'u", "parameter 'p"}) {
        EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
      }
      rank.coordinator().release_all();
      EXPECT_EQ(rank.coordinator().full_bytes(), 0);
    });
  }
}

TEST(CoordinatorLimits, ARankThatDivergesIsNamedAlsoWhereNothingIsGathered) {
  CoordinatorOptions options = limited(100, kUnlimitedBytes);
  options.persist_param_bytes = kUnlimitedBytes;
  options.persist_model_bytes = kUnlimitedBytes;
  on_ranks({3}, equal_layers(4, kLayerNumel), options, [&](auto& rank) {
    for (int step = 0; step < 2; ++step) {
      rank.train();
      rank.end_step_and_update();
    }
    rank.run(rank.all_units(), Phase::kForward);  // all is there now
    rank.run(rank.rank() == 1 ? std::vector<UnitId>{3, 1, 2, 0} : std::vector<UnitId>{3, 2, 1, 0},
             Phase::kBackward);
    try {
      rank.coordinator().end_step();
      FAIL() << "expected CommError";
    } catch (const CommError& error) {
      const std::string message = error.what();
      for (const char* word :
           {"rank 1", "number 6", "'u1 (p1)' on rank 1", "'u2 (p2)' on rank 0"}) {
        EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
      }
    }
    rank.coordinator().release_all();
  });
}

TEST(CoordinatorLimits, ResidentParametersAreGatheredOnce) {
  on_ranks({2}, mixed_model(), limited(100), [&](auto& rank) {
    rank.train(rank.all_units());
    rank.end_step_and_update();
    ASSERT_TRUE(rank.coordinator().begin_resident());
    EXPECT_THROW(rank.coordinator().begin_resident(), StateError);
    const std::vector<UnitId> units = rank.all_units();
    std::ignore = rank.take_stats();
    for (int token = 0; token < 20; ++token) {
      rank.run(units, Phase::kInference);
    }
    EXPECT_EQ(rank.take_stats().num_gathers, 0U);
    EXPECT_THROW(rank.coordinator().end_step(), StateError) << "their copies would be stale";
    rank.coordinator().end_resident();
    EXPECT_EQ(rank.coordinator().full_bytes(), 0);
    EXPECT_THROW(rank.coordinator().end_resident(), StateError);
    rank.train(units);
    rank.end_step_and_update();

    CoordinatorFixture small(rank.group(), equal_layers(4, kLayerNumel), limited(3));
    EXPECT_FALSE(small.coordinator().begin_resident()) << "does not fit";
    small.train();
    small.end_step_and_update();
  });
}

TEST(CoordinatorLimits, HeldParametersAreReadableBesideUnitsAndFreshAfterAChange) {
  on_ranks({2}, equal_layers(3, kLayerNumel), limited(2), [&](auto& rank) {
    Coordinator& coordinator = rank.coordinator();
    coordinator.begin_hold({1, 2}, "a look");
    rank.expect_right_values(1);
    rank.train();
    rank.expect_right_values(2);
    EXPECT_THROW(coordinator.end_step(), StateError) << "p1 is held";
    coordinator.end_hold({1, 2}, "a look", false);
    rank.end_step_and_update();
    rank.train();
    // Shards change outside of a step: copies that were made ahead must not survive it.
    coordinator.begin_hold({0, 1, 2}, "an edit");
    rank.update();
    coordinator.end_hold({0, 1, 2}, "an edit", true);
    rank.train();
    rank.end_step_and_update();
    EXPECT_EQ(coordinator.take_stats().arena_overflows, 0U);
  });
}

TEST(CoordinatorLimits, APlanThatIsTakenUpLateGathersNothingTwice) {
  Model model = equal_layers(4, kLayerNumel);
  model.units = {{0, 1}, {2}, {3}};  // the first unit needs two calls
  on_ranks({2}, model, limited(2), [&](auto& rank) {
    const auto train_without_start_ahead = [&] {
      std::ignore = rank.take_stats();
      rank.train();
      const CoordinatorStats stats = rank.take_stats();
      rank.coordinator().end_step();
      return stats;
    };
    const CoordinatorStats first = train_without_start_ahead();
    for (int step = 0; step < 2; ++step) {
      const CoordinatorStats stats = train_without_start_ahead();
      EXPECT_LT(stats.gathered_bytes, first.gathered_bytes);
      EXPECT_EQ(stats.prefetch_drops, 0U);
      EXPECT_EQ(stats.full_bytes_peak, 2 * kLayerBytes);
      EXPECT_EQ(stats.forward.missed_uses, 2U) << "unit 0, beside which there is no room for 1";
    }
  });
}

TEST(CoordinatorLimits, AHoldTakesTheRoomOfWhatWasGatheredAhead) {
  on_ranks({2}, equal_layers(5, kLayerNumel), limited(2), [&](auto& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.train();
      rank.end_step_and_update();  // 0 and 1 are on their way
    }
    std::ignore = rank.take_stats();
    rank.coordinator().begin_hold({1, 3}, "a look");
    rank.expect_right_values(3);
    EXPECT_EQ(rank.coordinator().full_bytes(), 2 * kLayerBytes);
    rank.coordinator().end_hold({1, 3}, "a look", false);
    rank.train();
    const CoordinatorStats stats = rank.take_stats();
    EXPECT_EQ(stats.full_bytes_peak, 2 * kLayerBytes);
    EXPECT_LE(stats.forward.missed_uses + stats.backward.missed_uses, 2U) << "the hold, and unit 0";
    rank.end_step_and_update();
  });
}

TEST(CoordinatorLimits, ALeafIsGatheredWholeAndItsInsideIsNothingOfItsOwn) {
  on_ranks({2}, equal_layers(1, kLayerNumel), limited(8), [&](auto& rank) {
    Coordinator& coordinator = rank.coordinator();
    // Names as in a model: u0 is the one that equal_layers made.
    const UnitId outer = coordinator.add_unit("moe", {0});
    EXPECT_THROW(coordinator.set_leaves(LeafRule::name("mo")), ConfigError);
    EXPECT_THROW(coordinator.set_leaves(LeafRule::type("Expert")), ConfigError);
    EXPECT_THROW(coordinator.set_leaves(LeafRule::numel_below(1000)), ConfigError);
    const UnitId inner = coordinator.add_unit("moe.expert", {0}, {"Expert", false});
    coordinator.set_leaves(LeafRule::type("Expert"));
    EXPECT_EQ(coordinator.leaves(), (std::vector<std::string>{"moe.expert"}));
    coordinator.clear_leaves(LeafRule::suffix("expert"));
    coordinator.set_leaves(LeafRule::numel_below(480));
    EXPECT_EQ(coordinator.leaves(), (std::vector<std::string>{"moe"}));
    coordinator.begin_use(outer, Phase::kForward);
    coordinator.begin_use(inner, Phase::kForward);
    EXPECT_EQ(rank.params()[0].num_users(), 1);
    coordinator.end_use(inner, Phase::kForward);
    coordinator.end_use(outer, Phase::kForward);
    coordinator.begin_use(inner, Phase::kForward);  // alone it is a unit like any other
    EXPECT_EQ(rank.params()[0].num_users(), 1);
    coordinator.end_use(inner, Phase::kForward);
    EXPECT_THROW(coordinator.set_leaves(LeafRule::name("moe")), ConfigError);
    coordinator.end_step();
  });
}

}  // namespace
}  // namespace tessera::coordinator
