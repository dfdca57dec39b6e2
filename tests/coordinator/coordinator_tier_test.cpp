// Uses see the same values at the same cost wherever shards are. The order of reads, updates and
// gathers: coordinator_tier_order_test.cpp.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/expect_names.h"
#include "tests/support/sizes.h"

namespace tessera::coordinator {
namespace {

using shard::ParamState;
using support::expect_names;

std::vector<CoordinatorOptions> some_option_combinations() {
  return {make_options(0, 0, 0, -1), make_options(1300, 2000, 0, 200),
          make_options(1300, kUnlimitedBytes, kUnlimitedBytes, -1),
          make_options(kUnlimitedBytes, kUnlimitedBytes, 0, 200)};
}

// Of mixed_model(): everything, every other one, the tied one, and the tiny ones with the empty.
std::vector<std::vector<int>> placements() {
  return {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 3, 5, 7, 9}, {0}, {1, 3, 4, 8}};
}

std::vector<NvmeChoice> choices() {
  std::vector<NvmeChoice> all;
  for (const std::vector<int>& ids : placements()) {
    for (const bool passes_on : {false, true}) {
      all.push_back(
          {ids, kSmallestLoaderBytes + (passes_on ? 3 : 0) * tier::kBlockBytes, passes_on});
    }
  }
  all.push_back({placements()[0], kSmallestLoaderBytes + 40 * tier::kBlockBytes, true});
  all.push_back({placements()[0], kSmallestLoaderBytes + 4 * tier::kBlockBytes, false});
  return all;
}

class TiersOn : public ::testing::TestWithParam<DeviceChoice> {};

TEST_P(TiersOn, UsesSeeTheUpdatedValuesAtThePlannedCostWhereverShardsAre) {
  const bool is_cpu = GetParam() == DeviceChoice::kCpu;
  const std::vector<NvmeChoice> nvme = choices();
  const std::vector<CoordinatorOptions> options = some_option_combinations();
  for (std::size_t i = 0; i < nvme.size() * options.size();
       i += is_cpu && !support::kIsSanitized ? 1 : 7) {
    Model model = mixed_model();
    model.nvme = nvme[i % nvme.size()];
    on_ranks({1, 2, 3}, model, options[i / nvme.size()], GetParam(),
             [](auto& rank) { rank.train_at_planned_cost(); });
  }
}

TEST_P(TiersOn, AShardMayBeLargerThanTheWindowAndAllBuffersTogether) {
  for (const std::size_t blocks : {0, 20}) {
    Model model = equal_layers(4, 10 * shard::kShardStep + 17);
    model.numels[2] = 90;  // one that fits
    model.nvme = {{0, 1, 2, 3}, kSmallestLoaderBytes + blocks * tier::kBlockBytes, true};
    on_ranks({1, 2, 3}, model, make_options(100'000, 250'000), GetParam(),
             [](auto& rank) { rank.train_at_planned_cost(); });
  }
}

// Passes in the usual order and others, evaluations, holds, residence, steps that end early and
// passes that are given up: all ranks draw the same.
class RandomProgram {
 public:
  RandomProgram(CoordinatorFixture& rank, unsigned seed) : rank_(rank), random_(seed) {}

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
          rank_.end_step_and_update();
          break;
        default:
          rank_.train();
          rank_.end_step_and_update();
      }
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }
  UnitId draw_unit() { return static_cast<UnitId>(draw(rank_.num_units())); }

  void run_uses(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      rank_.run({draw_unit()});
    }
  }
  void evaluate() { rank_.run(rank_.all_units(), Phase::kInference); }
  void hold() {
    const UnitId unit = draw_unit();
    const std::vector<int>& ids = rank_.model().units[static_cast<std::size_t>(unit)];
    rank_.coordinator().begin_hold(ids, "a look");
    rank_.expect_right_values(unit);
    rank_.coordinator().end_hold(ids, "a look", draw(2) == 0);
  }
  void stay_resident() {
    if (!rank_.coordinator().begin_resident()) {
      return;
    }
    evaluate();
    rank_.coordinator().end_resident();
  }
  void give_up() {
    run_uses(draw(3));
    rank_.begin(draw_unit(), Phase::kForward);
    rank_.coordinator().release_all();
  }

  CoordinatorFixture& rank_;
  std::mt19937 random_;
};

TEST_P(TiersOn, ValuesAreRightOnAnyWay) {
  for (const int num_ranks : {1, 2, 3}) {
    for (unsigned seed = 1; seed <= (GetParam() == DeviceChoice::kCpu ? 10U : 3U); ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << num_ranks << " ranks");
      Model model = mixed_model();
      const std::vector<NvmeChoice> all = choices();
      model.nvme = all[seed % all.size()];
      const std::vector<CoordinatorOptions> options = some_option_combinations();
      on_ranks({num_ranks}, model, options[seed % options.size()], GetParam(),
               [&](auto& rank) { RandomProgram(rank, seed).run(15); });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TiersOn,
                         ::testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                           DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST(CoordinatorTier, UsesMayOverlap) {
  for (const NvmeChoice& nvme : choices()) {
    Model model = mixed_model();
    model.nvme = nvme;
    on_ranks({1, 2}, model, make_options(1300, 2000, 0, 200), [](auto& rank) {
      for (int step = 0; step < 3; ++step) {
        rank.train_overlapping();
        rank.end_step_and_update();
      }
    });
  }
}

// Ranks use different experts, some on NVMe, some not.
TEST(CoordinatorTier, RanksMayUseDifferentUnitsOnNvme) {
  for (const DeviceChoice choice : {DeviceChoice::kCpu, DeviceChoice::kLazy}) {
    for (const int num_ranks : {1, 2, 3}) {
      Model model = equal_layers(6, 60);
      model.units[1].push_back(5);  // an expert's parameter that another unit needs as well
      model.is_dynamic = {false, false, true, true, true, true};
      model.nvme = {{0, 2, 3, 5}, kSmallestLoaderBytes + 2 * tier::kBlockBytes, true};
      on_ranks({num_ranks}, model,
               make_options(kUnlimitedBytes, kUnlimitedBytes, kUnlimitedBytes, 0), choice,
               [&](auto& rank) {
                 for (int step = 0; step < 12; ++step) {
                   for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
                     rank.run({0}, phase);
                     for (int i = 0; i < (rank.rank() + step) % 3; ++i) {
                       const UnitId unit = 2 + (rank.rank() * 3 + step + i) % 4;
                       rank.run({unit}, phase);
                     }
                     rank.run({1}, phase);
                   }
                   rank.coordinator().reach_consensus(ConsensusPoint::kStep);
                   rank.end_step_and_update();
                 }
               });
    }
  }
}

TEST(CoordinatorTier, OnlyUpdatesWrite) {
  Model model = mixed_model();
  model.nvme = choices().front();
  on_ranks({2}, model, some_option_combinations().front(), [&](auto& rank) {
    std::uint64_t all = 0;
    for (const int id : model.nvme.ids) {
      all += tier::whole_blocks(rank.params()[id].layout().shard_bytes());
    }
    for (int step = 0; step < 3; ++step) {
      rank.train();
      rank.coordinator().begin_hold({0, 5}, "a look");
      rank.coordinator().end_hold({0, 5}, "a look", /*changed=*/false);
      rank.coordinator().end_step();  // and no update
      rank.coordinator().start_ahead();
    }
    EXPECT_EQ(rank.nvme().written_bytes(), all);
  });
}

// When shards on NVMe are read and loaded: ahead of their gathers, behind their updates, never in
// the way of a use that does not need them; and what happens when that fails.

CoordinatorOptions prefetch(std::int64_t bucket_bytes) {
  return make_options(bucket_bytes, kUnlimitedBytes);
}

Model nvme_layers(std::size_t num_blocks, bool passes_on) {
  Model model = six_layers();
  model.nvme = {{0, 1, 2, 3, 4, 5},
                kSmallestLoaderBytes + num_blocks * tier::kBlockBytes,
                passes_on,
                /*is_held=*/true};
  return model;
}

std::vector<std::string> names(const std::vector<int>& ids) {
  std::vector<std::string> all;
  for (const int id : ids) {
    all.push_back(detail::concat("parameter 'p", id, "'"));
  }
  return all;
}

TEST(CoordinatorTierOrder, ReadsRunAheadOfGathersInTheOrderOfUse) {
  on_ranks({1, 2}, nvme_layers(3, /*passes_on=*/false), prefetch(0), [&](auto& rank) {
    rank.run(kInOrder);
    rank.nvme().hold_update(0);  // nothing can be read before the first use
    rank.end_step_and_update();
    HeldStore& store = rank.store();
    store.clear_seen();
    rank.nvme().release_updates();
    rank.wait_for_updates();
    store.hold(StoreCall::kRead, "'p2'");
    store.hold(StoreCall::kRead, "'p3'");
    rank.begin(0, Phase::kForward);
    EXPECT_EQ(rank.params()[1].state(), ParamState::kReleased) << "nothing is gathered ahead";
    store.wait_for_seen(kLayers + 4);  // the writes of the update are seen, too
    EXPECT_EQ(store.names_read(), names({0, 1, 2, 3})) << "as far as the window goes";
    rank.end(0, Phase::kForward);
    rank.begin(1, Phase::kForward);  // while the reads for later uses are held
    rank.end(1, Phase::kForward);
    store.release();
    rank.run({2, 3, 4, 5});
    EXPECT_EQ(store.names_read(), names({0, 1, 2, 3, 4, 5})) << "each once";
    rank.loader().wait_idle();
    EXPECT_GE(rank.loader().take_stats(Tier::kNvme).read_ahead_bytes,
              5 * rank.params()[0].layout().shard_bytes());
    rank.end_step_and_update();
  });
}

TEST(CoordinatorTierOrder, ThePassIsReadAheadFromItsStart) {
  on_ranks({1, 2}, nvme_layers(3, /*passes_on=*/false), prefetch(0), [&](auto& rank) {
    rank.run(kInOrder);
    rank.coordinator().end_step();
    rank.update();
    rank.wait_for_updates();
    rank.store().clear_seen();
    rank.coordinator().start_ahead();
    EXPECT_EQ(rank.store().names_read(), names({0, 1, 2}));
    rank.run(kInOrder);
    EXPECT_EQ(rank.store().names_read(), names({0, 1, 2, 3, 4, 5}));
  });
}

TEST(CoordinatorTierOrder, WhatTheUpdateHandsOverIsNotRead) {
  on_ranks({1, 2}, nvme_layers(2 * kLayers, /*passes_on=*/true), prefetch(kLayerBytes),
           [&](auto& rank) {
             for (int step = 0; step < 3; ++step) {
               rank.run(kInOrder);
               rank.end_step_and_update();
             }
             rank.run(kInOrder);
             EXPECT_TRUE(rank.store().names_read().empty());
             const std::uint64_t shard_bytes = rank.params()[0].layout().shard_bytes();
             EXPECT_EQ(rank.loader().take_stats(Tier::kNvme).from_update_bytes,
                       4 * kLayers * shard_bytes);
           });
}

TEST(CoordinatorTierOrder, UsesGoOnWhileUpdatesOfLaterParametersAreHeld) {
  for (const int num_ranks : {1, 2, 3}) {
    for (const std::int64_t bucket : {std::int64_t{0}, kLayerBytes}) {
      on_ranks({num_ranks}, nvme_layers(3, /*passes_on=*/true), prefetch(bucket), [&](auto& rank) {
        for (int step = 0; step < 3; ++step) {
          rank.run(kInOrder);
          rank.nvme().hold_update(2);
          rank.end_step_and_update();
          rank.run({0, 1});
          EXPECT_FALSE(rank.params()[2].updated().done());
          EXPECT_FALSE(rank.params()[5].updated().done());
          rank.nvme().release_updates();
          rank.run({2, 3, 4, 5});
          rank.end_step_and_update();
        }
      });
    }
  }
}

TEST(CoordinatorTierOrder, AStepThatEndsEarlyWaitsForItsUpdatesBeforeItForgets) {
  on_ranks({1, 2}, nvme_layers(2 * kLayers, /*passes_on=*/true), prefetch(0), [&](auto& rank) {
    rank.run(kInOrder);
    for (int step = 0; step < 3; ++step) {
      rank.nvme().hold_update(4);
      rank.end_step_and_update();
      std::thread releases([&] {
        for (int chance = 0; chance < 200; ++chance) {  // to forget too early
          std::this_thread::yield();
        }
        rank.nvme().release_updates();
      });
      rank.end_step_and_update();  // the second update of 4 and 5, without a use between
      releases.join();
      rank.run(kInOrder);
    }
  });
}

TEST(CoordinatorTierOrder, APersistentParameterGivesItsPlaceInTheWindowBackWhenItIsGathered) {
  for (const int num_ranks : {1, 2}) {
    Model model = nvme_layers(1, /*passes_on=*/true);
    model.numels[0] = 16;
    CoordinatorOptions options = prefetch(0);
    options.persist_param_bytes = 64;
    options.persist_model_bytes = kUnlimitedBytes;
    on_ranks({num_ranks}, model, options, [&](auto& rank) {
      rank.wait_for_updates();
      const std::vector<float> values(kLayerNumel);
      ShardLoader& loader = rank.loader();
      EXPECT_FALSE(loader.receive(3, 0, kLayerNumel, values.data())) << "p0 has the window";
      rank.run({0});
      ASSERT_TRUE(rank.coordinator().persists(0));
      EXPECT_EQ(rank.params()[0].state(), ParamState::kAvailable);
      loader.wait_idle();
      EXPECT_TRUE(loader.receive(3, 0, kLayerNumel, values.data()));
      loader.forget(3);
      rank.run(kInOrder);
      rank.end_step_and_update();
    });
  }
}

TEST(CoordinatorTierOrder, ATraceMissForgetsWhatWasReadAheadInVain) {
  on_ranks({1}, nvme_layers(2, /*passes_on=*/false), prefetch(0), [&](auto& rank) {
    rank.run(kInOrder);
    rank.end_step_and_update();
    rank.wait_for_updates();
    rank.run({0});  // 1 and 2 are in the window
    rank.begin(5, Phase::kForward);
    EXPECT_EQ(rank.coordinator().trace_mode(), TraceMode::kInvalid);
    const std::vector<float> values(kLayerNumel);
    EXPECT_TRUE(rank.loader().receive(3, 0, kLayerNumel, values.data()));
    EXPECT_TRUE(rank.loader().receive(4, 0, kLayerNumel, values.data()));
    rank.loader().forget_all();
    rank.end(5, Phase::kForward);
    rank.run({1, 2});
  });
}

TEST(CoordinatorTierFailure, OneRankGoesOnAfterAReadThatFailed) {
  for (const std::int64_t bucket : {std::int64_t{0}, kLayerBytes}) {
    Model model = nvme_layers(2, /*passes_on=*/false);
    model.nvme.ids = {0, 2, 3, 5};  // the others lie in memory
    model.units[3] = {3, 4};
    on_ranks({1}, model, prefetch(bucket), [&](auto& rank) {
      for (int step = 0; step < 3; ++step) {
        rank.run(kInOrder);
        rank.store().fail(StoreCall::kRead, "'p3'");
        rank.end_step_and_update();
        expect_names<IoError>([&] { rank.run(kInOrder); }, "'p3'");
        rank.coordinator().release_all();
        EXPECT_EQ(rank.coordinator().full_bytes(), 0);
        EXPECT_EQ(rank.coordinator().num_calls_in_flight(), 0U);
        rank.store().clear_rules();
      }
      rank.run({3, 4, 5, 0, 3, 2, 3});
      rank.end_step_and_update();
    });
  }
}

TEST(CoordinatorTierFailure, ADroppedReadThatFailedDoesNotStandInTheWayOfOthers) {
  on_ranks({1}, nvme_layers(2, /*passes_on=*/false), prefetch(kLayerBytes), [&](auto& rank) {
    rank.run(kInOrder);
    rank.store().fail(StoreCall::kRead, "'p1'");
    rank.end_step_and_update();
    rank.run({0, 3, 4, 2, 5, 3, 0});  // 1 was gathered ahead, and is not needed
    rank.coordinator().release_all();
    rank.store().clear_rules();
    rank.run(kInOrder);
    rank.end_step_and_update();
  });
}

TEST(CoordinatorTierFailure, AReadThatFailsOnOneRankIsToldToAll) {
  on_ranks({3}, nvme_layers(2, /*passes_on=*/false), prefetch(kLayerBytes), [&](auto& rank) {
    rank.run(kInOrder);
    if (rank.rank() == 1) {
      rank.store().fail(StoreCall::kRead, "'p3'");
    }
    rank.end_step_and_update();
    if (rank.rank() == 1) {
      expect_names<IoError>([&] { rank.run(kInOrder); }, "'p3'");
    } else {
      EXPECT_THROW(rank.run(kInOrder), CommError);
    }
    rank.coordinator().release_all();
    EXPECT_EQ(rank.coordinator().full_bytes(), 0);
  });
}

TEST(CoordinatorTierFailure, AnUpdateThatFailedIsToldToItsUse) {
  for (const bool passes_on : {false, true}) {
    on_ranks({1}, nvme_layers(8, passes_on), prefetch(kLayerBytes), [&](auto& rank) {
      rank.run(kInOrder);
      rank.nvme().fail_update(2);
      rank.end_step_and_update();
      rank.run({0, 1});
      expect_names<IoError>([&] { rank.run({2}); }, "the update of parameter 'p2'");
      rank.coordinator().release_all();
      rank.run({3, 0});
    });
  }
}

TEST(CoordinatorTierFailure, AWriteThatFailedIsToldToTheNextUseThatReads) {
  on_ranks({1}, nvme_layers(0, /*passes_on=*/false), prefetch(kLayerBytes), [&](auto& rank) {
    rank.run(kInOrder);
    rank.store().fail(StoreCall::kWrite, "'p4'");
    rank.end_step_and_update();
    expect_names<IoError>([&] { rank.run(kInOrder); }, "'p4'");
    rank.coordinator().release_all();
    rank.run({0, 1, 2, 3, 5});
  });
}

TEST(CoordinatorTierFailure, AParameterOnNvmeWithoutALoaderIsRefused) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      support::RankFixture rank(group.rank(), group.size());
      rank.add_param(8, Tier::kNvme);
      Coordinator coordinator(
          {group, rank.device(), rank.params(), rank.clock(), rank.spans(), rank.logger()},
          prefetch(0));
      coordinator.add_unit("u", {0});
      expect_names<InternalError>([&] { coordinator.begin_use(0, Phase::kForward); }, "'p0'");
    });
  }
}

// The coordinator goes while shards are on their way into its memory.
TEST(CoordinatorTierFailure, ARankMayEndInTheMiddle) {
  for (const int num_ranks : {1, 2}) {
    for (int moment = 0; moment < 4; ++moment) {
      on_ranks({num_ranks}, nvme_layers(2, moment % 2 == 0), prefetch(kLayerBytes),
               [&](auto& rank) {
                 rank.run(kInOrder);
                 if (moment > 1) {
                   rank.nvme().hold_update(1);
                 }
                 rank.end_step_and_update();
                 if (moment % 2 == 1) {
                   rank.begin(0, Phase::kForward);
                 }
               });
    }
  }
}

}  // namespace
}  // namespace tessera::coordinator
