// Uses see the same values at the same cost wherever shards are. The order of reads, updates and
// gathers: coordinator_tier_order_test.cpp.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/option_table.h"
#include "testing/thread_backend.h"
#include "tests/coordinator/coordinator_world.h"
#include "tests/support/sizes.h"

namespace tessera::coordinator {
namespace {

using comm::Group;
using comm::run_ranks;

std::vector<CoordinatorOptions> some_option_combinations() {
  return {make_options(0, 0, 0, -1), make_options(1300, 2000, 0, 200),
          make_options(1300, kUnlimitedBytes, kUnlimitedBytes, -1),
          make_options(kUnlimitedBytes, kUnlimitedBytes, 0, 200)};
}

// Of mixed_model(): everything, every other one, the tied one, and the tiny ones with the empty.
std::vector<std::vector<int>> placements() {
  return {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 3, 5, 7, 9}, {0}, {1, 3, 4, 8}};
}

std::vector<StoredChoice> choices() {
  std::vector<StoredChoice> all;
  for (const std::vector<int>& ids : placements()) {
    for (const bool offers : {false, true}) {
      all.push_back({ids, kSmallestLoaderBytes + (offers ? 3 : 0) * tier::kBlockBytes, offers});
    }
  }
  all.push_back({placements()[0], kSmallestLoaderBytes + 40 * tier::kBlockBytes, true});
  all.push_back({placements()[0], kSmallestLoaderBytes + 4 * tier::kBlockBytes, false});
  return all;
}

std::uint64_t shard_bytes_of(RankWorld& world, const GatherList& list) {
  std::uint64_t bytes = 0;
  for (const int id : list) {
    bytes += world.model().stored.has(id) ? world.params()[id].layout().shard_bytes() : 0;
  }
  return bytes;
}

// What one step of the plan brings.
std::uint64_t loaded_bytes_of(RankWorld& world, const PrefetchPlan& plan) {
  std::uint64_t bytes = 0;
  std::vector<PlannedUse> all = plan.uses;
  all.push_back(plan.ahead);
  for (const PlannedUse& use : all) {
    bytes += shard_bytes_of(world, use.demand);
    for (const GatherList& list : use.prefetch) {
      bytes += shard_bytes_of(world, list);
    }
  }
  return bytes;
}

// Four steps with updates between them; the last two follow the plan exactly.
void train_stored(Group& group, const Model& model, const CoordinatorOptions& options,
                  DeviceChoice choice) {
  RankWorld world(group, model, options, choice);
  const std::vector<Use> uses = RankWorld::uses_of_step(world.model().units.size());
  for (int step = 0; step < 2; ++step) {
    world.run_step();
    world.end_step_and_update();
    EXPECT_EQ(world.coordinator().trace_mode(), TraceMode::kComplete);
  }
  // What was started ahead is counted where it was started.
  std::ignore = world.coordinator().take_stats();
  world.stored().loader().wait_idle();
  std::ignore = world.stored().loader().take_stats(Tier::kNvme);
  for (int step = 0; step < 2; ++step) {
    world.run_step();
    world.end_step_and_update();
  }
  world.stored().loader().wait_idle();
  const CoordinatorStats stats = world.coordinator().take_stats();
  const PrefetchPlan plan = world.expected_plan(uses);
  const PlanSums sums = sums_of(plan, world.params());
  EXPECT_EQ(stats.num_uses, 2 * uses.size());
  EXPECT_EQ(stats.prefetch_drops, 0U);
  EXPECT_EQ(stats.num_gathers, 2 * sums.num_gathers);
  EXPECT_EQ(stats.gathered_bytes, 2 * sums.gathered_bytes);
  EXPECT_EQ(stats.prefetch_misses, 2 * sums.num_demanded);
  EXPECT_EQ(stats.prefetch_hits, 2 * sums.num_prefetched);
  EXPECT_EQ(stats.arena_overflows, 0U);
  const LoaderStats fed = world.stored().loader().take_stats(Tier::kNvme);
  EXPECT_EQ(fed.loaded_bytes, 2 * loaded_bytes_of(world, plan));
  EXPECT_LE(fed.from_update_bytes + fed.read_ahead_bytes, fed.loaded_bytes);
  if (!model.stored.offers) {
    EXPECT_EQ(fed.from_update_bytes, 0U);
  }
}

class TiersOn : public ::testing::TestWithParam<DeviceChoice> {};

TEST_P(TiersOn, UsesSeeTheUpdatedValuesAtThePlannedCostWhereverShardsAre) {
  const bool is_cpu = GetParam() == DeviceChoice::kCpu;
  const std::vector<StoredChoice> stored = choices();
  const std::vector<CoordinatorOptions> options = some_option_combinations();
  for (const int num_ranks : {1, 2, 3}) {
    run_ranks(num_ranks, [&](Group& group) {
      for (std::size_t i = 0; i < stored.size() * options.size();
           i += is_cpu && !support::kIsSanitized ? 1 : 7) {
        Model model = mixed_model();
        model.stored = stored[i % stored.size()];
        train_stored(group, model, options[i / stored.size()], GetParam());
      }
    });
  }
}

TEST_P(TiersOn, AShardMayBeLargerThanTheWindowAndAllBuffersTogether) {
  for (const int num_ranks : {1, 2, 3}) {
    run_ranks(num_ranks, [&](Group& group) {
      for (const std::size_t blocks : {0, 20}) {
        Model model = equal_layers(4, 10 * shard::kShardStep + 17);
        model.numels[2] = 90;  // one that fits
        model.stored = {{0, 1, 2, 3}, kSmallestLoaderBytes + blocks * tier::kBlockBytes, true};
        train_stored(group, model, make_options(100'000, 250'000, 0, 0), GetParam());
      }
    });
  }
}

// Passes in the usual order and others, evaluations, holds, residence, steps that end early and
// passes that are given up: all ranks draw the same.
class Walk {
 public:
  Walk(RankWorld& world, unsigned seed) : world_(world), random_(seed) {}

  void run(int num_moves) {
    for (int move = 0; move < num_moves; ++move) {
      switch (draw(7)) {
        case 0:
          evaluate();
          break;
        case 1:
          hold();
          break;
        case 2:
          stay_resident();
          break;
        case 3:
          give_up();
          break;
        case 4:
          run_uses(draw(6) + 1);
          world_.end_step_and_update();
          break;
        default:
          world_.run_step();
          world_.end_step_and_update();
      }
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }

 private:
  std::size_t num_units() const { return world_.model().units.size(); }
  std::size_t draw(std::size_t below) { return random_() % below; }
  UnitId draw_unit() { return static_cast<UnitId>(draw(num_units())); }

  void run_uses(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const UnitId unit = draw_unit();
      world_.begin(unit, Phase::kForward);
      world_.end(unit, Phase::kForward);
    }
  }
  void evaluate() {
    for (std::size_t i = 0; i < num_units(); ++i) {
      world_.begin(static_cast<UnitId>(i), Phase::kInference);
      world_.end(static_cast<UnitId>(i), Phase::kInference);
    }
  }
  void hold() {
    const UnitId unit = draw_unit();
    const std::vector<int>& ids = world_.model().units[static_cast<std::size_t>(unit)];
    world_.coordinator().begin_hold(ids, "a look");
    world_.expect_right_values(unit);
    world_.coordinator().end_hold(ids, "a look", draw(2) == 0);
  }
  void stay_resident() {
    if (!world_.coordinator().begin_resident()) {
      return;
    }
    evaluate();
    world_.coordinator().end_resident();
  }
  void give_up() {
    run_uses(draw(3));
    world_.begin(draw_unit(), Phase::kForward);
    world_.coordinator().release_all();
  }

  RankWorld& world_;
  std::mt19937 random_;
};

TEST_P(TiersOn, ValuesAreRightOnAnyWay) {
  for (const int num_ranks : {1, 2, 3}) {
    for (unsigned seed = 1; seed <= (GetParam() == DeviceChoice::kCpu ? 10U : 3U); ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << num_ranks << " ranks");
      run_ranks(num_ranks, [&](Group& group) {
        Model model = mixed_model();
        const std::vector<StoredChoice> all = choices();
        model.stored = all[seed % all.size()];
        const std::vector<CoordinatorOptions> options = some_option_combinations();
        RankWorld world(group, model, options[seed % options.size()], GetParam());
        Walk(world, seed).run(15);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TiersOn,
                         ::testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                           DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST(CoordinatorTier, UsesMayOverlap) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [&](Group& group) {
      for (const StoredChoice& stored : choices()) {
        Model model = mixed_model();
        model.stored = stored;
        RankWorld world(group, model, make_options(1300, 2000, 0, 200));
        for (int step = 0; step < 3; ++step) {
          world.begin(0, Phase::kForward);
          for (UnitId unit = 1; unit < 6; ++unit) {
            world.begin(unit, Phase::kForward);
            world.end(unit, Phase::kForward);
          }
          world.end(0, Phase::kForward);
          for (UnitId unit = 5; unit >= 0; --unit) {
            world.begin(unit, Phase::kBackward);
            if (unit < 5) {
              world.end(unit + 1, Phase::kBackward);
            }
          }
          world.end(0, Phase::kBackward);
          world.end_step_and_update();
        }
      }
    });
  }
}

// Ranks use different experts, some stored, some not.
TEST(CoordinatorTier, RanksMayUseDifferentStoredUnits) {
  for (const DeviceChoice choice : {DeviceChoice::kCpu, DeviceChoice::kLazy}) {
    for (const int num_ranks : {1, 2, 3}) {
      run_ranks(num_ranks, [&](Group& group) {
        Model model = equal_layers(6, 60);
        model.units[1].push_back(5);  // an expert's parameter that another unit needs as well
        model.is_dynamic = {false, false, true, true, true, true};
        model.stored = {{0, 2, 3, 5}, kSmallestLoaderBytes + 2 * tier::kBlockBytes, true};
        RankWorld world(group, model,
                        make_options(kUnlimitedBytes, kUnlimitedBytes, kUnlimitedBytes, 0), choice);
        for (int step = 0; step < 12; ++step) {
          for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
            world.begin(0, phase);
            world.end(0, phase);
            for (int i = 0; i < (group.rank() + step) % 3; ++i) {
              const UnitId unit = 2 + (group.rank() * 3 + step + i) % 4;
              world.begin(unit, phase);
              world.end(unit, phase);
            }
            world.begin(1, phase);
            world.end(1, phase);
          }
          world.coordinator().meet(MeetingPoint::kStep);
          world.end_step_and_update();
        }
      });
    }
  }
}

TEST(CoordinatorTier, OnlyUpdatesWrite) {
  run_ranks(2, [](Group& group) {
    Model model = mixed_model();
    model.stored = choices().front();
    RankWorld world(group, model, some_option_combinations().front());
    std::uint64_t all = 0;
    for (const int id : model.stored.ids) {
      all += tier::whole_blocks(world.params()[id].layout().shard_bytes());
    }
    for (int step = 0; step < 3; ++step) {
      world.run_step();
      world.coordinator().begin_hold({0, 5}, "a look");
      world.coordinator().end_hold({0, 5}, "a look", /*changed=*/false);
      world.coordinator().end_step();  // and no update
      world.coordinator().start_ahead();
    }
    EXPECT_EQ(world.stored().written_bytes(), all);
  });
}

}  // namespace
}  // namespace tessera::coordinator
