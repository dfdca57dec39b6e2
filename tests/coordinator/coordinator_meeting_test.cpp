// Units that only some ranks use, and ranks that run out of data.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "testing/thread_backend.h"
#include "tests/coordinator/coordinator_world.h"

namespace tessera::coordinator {
namespace {

using comm::Group;
using comm::run_ranks;

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
  CoordinatorOptions options;
  options.budgets.bucket_bytes = kUnlimitedBytes;
  options.budgets.live_limit_bytes = kUnlimitedBytes;
  options.budgets.reuse_distance_bytes = kUnlimitedBytes;
  options.budgets.merge_below_bytes = 0;
  return options;
}

void run_unit(RankWorld& world, UnitId unit, Phase phase) {
  world.begin(unit, phase);
  world.end(unit, phase);
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

TEST(Meeting, RanksMayUseDifferentUnitsForwardAndBackward) {
  run_ranks(4, [](Group& group) {
    RankWorld world(group, experts(), options());
    Coordinator& coordinator = world.coordinator();
    Gradients gradients;
    coordinator.set_dynamic_gradients(gradients.hooks());
    std::map<int, int> expected_reductions;
    for (int step = 0; step < 50; ++step) {
      const std::vector<UnitId> chosen = route(1, step, group.rank());
      run_unit(world, 0, Phase::kForward);
      for (const UnitId unit : chosen) {
        run_unit(world, unit, Phase::kForward);
      }
      run_unit(world, 1, Phase::kForward);
      run_unit(world, 10, Phase::kForward);
      run_unit(world, 10, Phase::kBackward);
      run_unit(world, 1, Phase::kBackward);
      for (std::size_t i = chosen.size(); i-- > 0;) {
        run_unit(world, chosen[i], Phase::kBackward);
        gradients.pending.insert(chosen[i]);
      }
      run_unit(world, 0, Phase::kBackward);
      coordinator.meet(MeetingPoint::kBackwardEnd);
      EXPECT_TRUE(gradients.pending.empty());
      coordinator.meet(MeetingPoint::kStep);
      world.end_step_and_update();
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

TEST(Meeting, WhatOnlyOneRankWantsIsSentToThatRankAlone) {
  run_ranks(3, [](Group& group) {
    RankWorld world(group, experts(), options());
    run_unit(world, 0, Phase::kForward);
    const std::uint64_t before = group.wire_bytes().payload;
    if (group.rank() == 1) {
      run_unit(world, 5, Phase::kForward);
    }
    run_unit(world, 0, Phase::kForward);  // held: nothing more is gathered
    const auto shard = static_cast<std::uint64_t>(world.params()[5].layout().shard_bytes());
    const std::uint64_t words = 2 * 2 * 2 * 8;  // two rounds of two words to two peers
    const std::uint64_t again = world.params()[0].layout().shard_bytes() * 2;
    EXPECT_EQ(group.wire_bytes().payload - before, words + again + (group.rank() == 1 ? 0 : shard));
    EXPECT_EQ(world.params()[5].state(), shard::ParamState::kReleased);
  });
}

TEST(Meeting, AStaticUnitMayShareParametersWithADynamicOneThatIsStillOpenSomewhere) {
  run_ranks(3, [](Group& group) {
    Model model = experts();
    model.units[1].push_back(5);  // as a weight in the loss
    model.units[10].push_back(5);
    RankWorld world(group, model, options());
    world.params()[5].set_dynamic(false);
    for (int step = 0; step < 4; ++step) {
      run_unit(world, 0, Phase::kForward);
      if (group.rank() != 1) {
        run_unit(world, 5, Phase::kForward);
      }
      run_unit(world, 1, Phase::kForward);
      if (group.rank() == 2) {
        world.begin(5, Phase::kBackward);  // ends late
      }
      run_unit(world, 10, Phase::kBackward);
      run_unit(world, 1, Phase::kBackward);
      if (group.rank() == 2) {
        world.end(5, Phase::kBackward);
      }
      run_unit(world, 0, Phase::kBackward);
      world.coordinator().meet(MeetingPoint::kStep);
      world.end_step_and_update();
    }
    EXPECT_EQ(world.coordinator().trace_mode(), TraceMode::kComplete);
  });
}

TEST(Meeting, RanksAtDifferentStaticUnitsAreAllNamed) {
  run_ranks(3, [](Group& group) {
    RankWorld world(group, experts(), options());
    run_unit(world, 0, Phase::kForward);
    try {
      run_unit(world, group.rank() == 2 ? 10 : 1, Phase::kForward);
      FAIL() << "expected CommError";
    } catch (const CommError& error) {
      const std::string text = error.what();
      for (const char* word : {"rank 0 is at the forward of unit 'u1'", "'p1'",
                               "rank 2 is at the forward of unit 'u10'", "unit.dynamic_names"}) {
        EXPECT_NE(text.find(word), std::string::npos) << text;
      }
    }
    world.coordinator().release_all();
  });
}

TEST(Meeting, ARankWithoutDataFollowsTheOthersUntilAllAreDone) {
  run_ranks(3, [](Group& group) {
    CoordinatorOptions uneven = options();
    uneven.uneven_data = true;
    RankWorld world(group, experts(), uneven);
    Coordinator& coordinator = world.coordinator();
    Gradients gradients;
    coordinator.set_dynamic_gradients(gradients.hooks());
    const int own_steps = 2 + 2 * group.rank();
    int num_steps = 0;
    for (;;) {
      if (num_steps < own_steps) {
        run_unit(world, 0, Phase::kForward);
        run_unit(world, 2 + group.rank(), Phase::kForward);
        run_unit(world, 1, Phase::kForward);
        run_unit(world, 1, Phase::kBackward);
        run_unit(world, 2 + group.rank(), Phase::kBackward);
        gradients.pending.insert(2 + group.rank());
        run_unit(world, 0, Phase::kBackward);
        coordinator.meet(MeetingPoint::kBackwardEnd);
        coordinator.meet(MeetingPoint::kStep);
      } else {
        MeetingPoint point = coordinator.follow();
        if (point == MeetingPoint::kAllDone) {
          break;
        }
        EXPECT_EQ(point, MeetingPoint::kBackwardEnd);
        EXPECT_EQ(coordinator.follow(), MeetingPoint::kStep);
      }
      world.end_step_and_update();
      ++num_steps;
    }
    EXPECT_EQ(num_steps, 6);
    EXPECT_EQ(gradients.num_reduced, (std::map<int, int>{{2, 2}, {3, 4}, {4, 6}}));
  });
}

TEST(Meeting, FollowingNeedsTheOthersToMeet) {
  run_ranks(2, [](Group& group) {
    RankWorld world(group, equal_layers(2, kNumel), options());
    EXPECT_FALSE(world.coordinator().meets());
    EXPECT_THROW(world.coordinator().follow(), ConfigError);
  });
  run_ranks(1, [](Group& group) {
    RankWorld world(group, experts(), options());
    EXPECT_EQ(world.coordinator().follow(), MeetingPoint::kAllDone);
    run_unit(world, 4, Phase::kForward);  // alone, dynamic is nothing special
  });
}

}  // namespace
}  // namespace tessera::coordinator
