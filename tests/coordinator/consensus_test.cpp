// Units that only some ranks use, and ranks that run out of data.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"

namespace tessera::coordinator {
namespace {

constexpr int kExperts = 8;
constexpr std::int64_t kNumel = 60;

// Units: 0 and 1 around the experts 2 to 9; a second layer of the same is 10 with 11.
Model experts() {
  Model model = equal_layers(2 + kExperts + 2, kNumel);
  model.is_dynamic.assign(model.units.size(), false);
  for (std::size_t i = 2; i < 2 + kExperts; ++i) {
    model.is_dynamic[i] = true;
  }
  return model;
}

CoordinatorOptions options() {
  return make_options(kUnlimitedBytes, kUnlimitedBytes, kUnlimitedBytes);
}

// What each rank has of gradients, and what was reduced; shared by nobody.
struct Gradients {
  std::set<int> pending;
  std::map<int, int> num_reduced;

  DynamicGradients hooks() {
    return {[this] { return std::vector<int>(pending.begin(), pending.end()); },
            [this](std::span<const int> ids) {
              for (const int id : ids) {
                ++num_reduced[id];
                pending.erase(id);
              }
            }};
  }
};

std::vector<UnitId> route(unsigned seed, int step, int rank) {
  std::mt19937 random(seed * 7919U + static_cast<unsigned>(step * 31 + rank));
  std::vector<UnitId> chosen;
  for (unsigned i = 0; i < random() % 4; ++i) {
    chosen.push_back(static_cast<UnitId>(2 + random() % (kExperts - 1)));  // the last: nobody
  }
  return chosen;
}

TEST(Consensus, RanksMayUseDifferentUnitsForwardAndBackward) {
  on_ranks({4}, experts(), options(), [&](auto& rank) {
    Coordinator& coordinator = rank.coordinator();
    Gradients gradients;
    coordinator.set_dynamic_gradients(gradients.hooks());
    std::map<int, int> expected_reductions;
    for (int step = 0; step < 50; ++step) {
      const std::vector<UnitId> chosen = route(1, step, rank.rank());
      rank.run({0}, Phase::kForward);
      for (const UnitId unit : chosen) {
        rank.run({unit}, Phase::kForward);
      }
      rank.run({1}, Phase::kForward);
      rank.run({10}, Phase::kForward);
      rank.run({10}, Phase::kBackward);
      rank.run({1}, Phase::kBackward);
      for (std::size_t i = chosen.size(); i-- > 0;) {
        rank.run({chosen[i]}, Phase::kBackward);
        gradients.pending.insert(chosen[i]);
      }
      rank.run({0}, Phase::kBackward);
      coordinator.reach_consensus(ConsensusPoint::kBackwardEnd);
      EXPECT_TRUE(gradients.pending.empty());
      coordinator.reach_consensus(ConsensusPoint::kStep);
      rank.end_step_and_update();
      std::set<int> used;
      for (int rank = 0; rank < 4; ++rank) {
        for (const UnitId unit : route(1, step, rank)) {
          used.insert(unit);
        }
      }
      for (const int unit : used) {
        ++expected_reductions[unit];
      }
      if (step > 1) {
        EXPECT_EQ(coordinator.trace_mode(), TraceMode::kComplete) << "static uses are known";
      }
    }
    EXPECT_EQ(gradients.num_reduced, expected_reductions);
    const UnitReport unused = coordinator.report(2 + kExperts - 1);
    EXPECT_EQ(unused.forward.demand_calls + unused.backward.demand_calls, 0U);
    const CoordinatorStats stats = coordinator.take_stats();
    EXPECT_EQ(stats.arena_overflows, 0U);
    EXPECT_GT(stats.num_consensus_rounds, 0U);
  });
}

TEST(Consensus, WhatOnlyOneRankWantsIsSentToThatRankAlone) {
  on_ranks({3}, experts(), options(), [&](auto& rank) {
    rank.run({0}, Phase::kForward);
    const std::uint64_t before = rank.group().wire_bytes().payload;
    if (rank.rank() == 1) {
      rank.run({5}, Phase::kForward);
    }
    rank.run({0}, Phase::kForward);  // held: nothing more is gathered
    const auto shard = static_cast<std::uint64_t>(rank.params()[5].layout().shard_bytes());
    const std::uint64_t words = 2 * 2 * 2 * 8;  // two rounds of two words to two peers
    const std::uint64_t again = rank.params()[0].layout().shard_bytes() * 2;
    EXPECT_EQ(rank.group().wire_bytes().payload - before,
              words + again + (rank.rank() == 1 ? 0 : shard));
    EXPECT_EQ(rank.params()[5].state(), shard::ParamState::kReleased);
  });
}

TEST(Consensus, AStaticUnitMayShareParametersWithADynamicOneThatIsStillOpenSomewhere) {
  Model model = experts();
  model.units[1].push_back(5);  // as a weight in the loss
  model.units[10].push_back(5);
  on_ranks({3}, model, options(), [&](auto& rank) {
    rank.params()[5].set_dynamic(false);
    for (int step = 0; step < 4; ++step) {
      rank.run({0}, Phase::kForward);
      if (rank.rank() != 1) {
        rank.run({5}, Phase::kForward);
      }
      rank.run({1}, Phase::kForward);
      if (rank.rank() == 2) {
        rank.begin(5, Phase::kBackward);  // ends late
      }
      rank.run({10}, Phase::kBackward);
      rank.run({1}, Phase::kBackward);
      if (rank.rank() == 2) {
        rank.end(5, Phase::kBackward);
      }
      rank.run({0}, Phase::kBackward);
      rank.coordinator().reach_consensus(ConsensusPoint::kStep);
      rank.end_step_and_update();
    }
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kComplete);
  });
}

TEST(Consensus, RanksAtDifferentStaticUnitsAreAllNamed) {
  on_ranks({3}, experts(), options(), [&](auto& rank) {
    rank.run({0}, Phase::kForward);
    try {
      rank.run({rank.rank() == 2 ? 10 : 1}, Phase::kForward);
      FAIL() << "expected CommError";
    } catch (const CommError& error) {
      const std::string text = error.what();
      for (const char* word : {"rank 0 is at the forward of unit 'u1'", "'p1'",
                               "rank 2 is at the forward of unit 'u10'", "unit.dynamic_names"}) {
        EXPECT_NE(text.find(word), std::string::npos) << text;
      }
    }
    rank.coordinator().release_all();
  });
}

TEST(Consensus, ARankWithoutDataJoinsTheOthersUntilAllAreDone) {
  CoordinatorOptions uneven = options();
  uneven.uneven_data = true;
  on_ranks({3}, experts(), uneven, [&](auto& rank) {
    Coordinator& coordinator = rank.coordinator();
    Gradients gradients;
    coordinator.set_dynamic_gradients(gradients.hooks());
    const int own_steps = 2 + 2 * rank.rank();
    int num_steps = 0;
    for (;;) {
      if (num_steps < own_steps) {
        rank.run({0}, Phase::kForward);
        rank.run({2 + rank.rank()}, Phase::kForward);
        rank.run({1}, Phase::kForward);
        rank.run({1}, Phase::kBackward);
        rank.run({2 + rank.rank()}, Phase::kBackward);
        gradients.pending.insert(2 + rank.rank());
        rank.run({0}, Phase::kBackward);
        coordinator.reach_consensus(ConsensusPoint::kBackwardEnd);
        coordinator.reach_consensus(ConsensusPoint::kStep);
      } else {
        ConsensusPoint point = coordinator.join();
        if (point == ConsensusPoint::kAllDone) {
          break;
        }
        EXPECT_EQ(point, ConsensusPoint::kBackwardEnd);
        EXPECT_EQ(coordinator.join(), ConsensusPoint::kStep);
      }
      rank.end_step_and_update();
      ++num_steps;
    }
    EXPECT_EQ(num_steps, 6);
    EXPECT_EQ(gradients.num_reduced, (std::map<int, int>{{2, 2}, {3, 4}, {4, 6}}));
  });
}

TEST(Consensus, JoiningNeedsTheOthersToAgreeOnEveryUse) {
  on_ranks({2}, equal_layers(2, kNumel), options(), [&](auto& rank) {
    EXPECT_FALSE(rank.coordinator().needs_consensus());
    EXPECT_THROW(rank.coordinator().join(), ConfigError);
  });
  on_ranks({1}, experts(), options(), [&](auto& rank) {
    EXPECT_EQ(rank.coordinator().join(), ConsensusPoint::kAllDone);
    rank.run({4}, Phase::kForward);  // alone, dynamic is nothing special
  });
}

}  // namespace
}  // namespace tessera::coordinator
