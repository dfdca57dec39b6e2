// When stored shards are read and brought: ahead of their gathers, behind their updates, never in
// the way of a use that does not need them; and what happens when that fails.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "testing/thread_backend.h"
#include "tests/coordinator/coordinator_world.h"
#include "tests/support/expect_names.h"

namespace tessera::coordinator {
namespace {

using comm::Group;
using comm::run_ranks;
using shard::ParamState;
using support::expect_names;
using tessera::support::HeldStore;
using tessera::support::StoreCall;

CoordinatorOptions prefetch(std::int64_t bucket_bytes) {
  CoordinatorOptions options;
  options.budgets.bucket_bytes = bucket_bytes;
  options.budgets.max_inflight = 4;
  options.budgets.merge_below_bytes = 0;
  options.budgets.live_limit_bytes = kUnlimitedBytes;
  options.budgets.reuse_distance_bytes = 0;
  return options;
}

Model stored_layers(std::size_t num_blocks, bool offers) {
  Model model = equal_layers(kLayers, kLayerNumel);
  model.stored = {{0, 1, 2, 3, 4, 5},
                  kSmallestLoaderBytes + num_blocks * tier::kBlockBytes,
                  offers,
                  StoredChoice::Kind::kHeld};
  return model;
}

std::vector<std::string> names(const std::vector<int>& ids) {
  std::vector<std::string> all;
  for (const int id : ids) {
    all.push_back(detail::concat("parameter 'p", id, "'"));
  }
  return all;
}

void wait_for_updates(RankWorld& world) {
  for (int id = 0; id < world.params().num_params(); ++id) {
    world.params()[id].updated().wait();
  }
}

TEST(CoordinatorTierOrder, ReadsRunAheadOfGathersInTheOrderOfUse) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      RankWorld world(group, stored_layers(3, /*offers=*/false), prefetch(0));
      run_forward(world, kInOrder);
      world.stored().hold_update(0);  // nothing can be read before the first use
      world.end_step_and_update();
      HeldStore& store = world.stored().held_store();
      store.clear_seen();
      world.stored().release_updates();
      wait_for_updates(world);
      store.hold(StoreCall::kRead, "'p2'");
      store.hold(StoreCall::kRead, "'p3'");
      world.begin(0, Phase::kForward);
      EXPECT_EQ(world.params()[1].state(), ParamState::kReleased) << "nothing is gathered ahead";
      store.wait_for_seen(kLayers + 4);  // the writes of the update are seen, too
      EXPECT_EQ(store.names_read(), names({0, 1, 2, 3})) << "as far as the window goes";
      world.end(0, Phase::kForward);
      world.begin(1, Phase::kForward);  // while the reads for later uses are held
      world.end(1, Phase::kForward);
      store.release();
      run_forward(world, {2, 3, 4, 5});
      EXPECT_EQ(store.names_read(), names({0, 1, 2, 3, 4, 5})) << "each once";
      world.stored().loader().wait_idle();
      EXPECT_GE(world.stored().loader().take_stats(Tier::kNvme).read_ahead_bytes,
                5 * world.params()[0].layout().shard_bytes());
      world.end_step_and_update();
    });
  }
}

TEST(CoordinatorTierOrder, ThePassIsReadAheadFromItsStart) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      RankWorld world(group, stored_layers(3, /*offers=*/false), prefetch(0));
      run_forward(world, kInOrder);
      world.coordinator().end_step();
      world.update();
      wait_for_updates(world);
      world.stored().held_store().clear_seen();
      world.coordinator().start_ahead();
      EXPECT_EQ(world.stored().held_store().names_read(), names({0, 1, 2}));
      run_forward(world, kInOrder);
      EXPECT_EQ(world.stored().held_store().names_read(), names({0, 1, 2, 3, 4, 5}));
    });
  }
}

TEST(CoordinatorTierOrder, WhatTheUpdateHandsOverIsNotRead) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      RankWorld world(group, stored_layers(2 * kLayers, /*offers=*/true), prefetch(kLayerBytes));
      for (int step = 0; step < 3; ++step) {
        run_forward(world, kInOrder);
        world.end_step_and_update();
      }
      run_forward(world, kInOrder);
      EXPECT_TRUE(world.stored().held_store().names_read().empty());
      const std::uint64_t shard_bytes = world.params()[0].layout().shard_bytes();
      EXPECT_EQ(world.stored().loader().take_stats(Tier::kNvme).from_update_bytes, 4 * kLayers * shard_bytes);
    });
  }
}

TEST(CoordinatorTierOrder, UsesGoOnWhileUpdatesOfLaterParametersAreHeld) {
  for (const int num_ranks : {1, 2, 3}) {
    for (const std::int64_t bucket : {std::int64_t{0}, kLayerBytes}) {
      run_ranks(num_ranks, [&](Group& group) {
        RankWorld world(group, stored_layers(3, /*offers=*/true), prefetch(bucket));
        for (int step = 0; step < 3; ++step) {
          run_forward(world, kInOrder);
          world.stored().hold_update(2);
          world.end_step_and_update();
          run_forward(world, {0, 1});
          EXPECT_FALSE(world.params()[2].updated().done());
          EXPECT_FALSE(world.params()[5].updated().done());
          world.stored().release_updates();
          run_forward(world, {2, 3, 4, 5});
          world.end_step_and_update();
        }
      });
    }
  }
}

TEST(CoordinatorTierOrder, AStepThatEndsEarlyWaitsForItsUpdatesBeforeItForgets) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      RankWorld world(group, stored_layers(2 * kLayers, /*offers=*/true), prefetch(0));
      run_forward(world, kInOrder);
      for (int step = 0; step < 3; ++step) {
        world.stored().hold_update(4);
        world.end_step_and_update();
        std::thread releases([&] {
          for (int chance = 0; chance < 200; ++chance) {  // to forget too early
            std::this_thread::yield();
          }
          world.stored().release_updates();
        });
        world.end_step_and_update();  // the second update of 4 and 5, without a use between
        releases.join();
        run_forward(world, kInOrder);
      }
    });
  }
}

TEST(CoordinatorTierOrder, APersistentParameterGivesItsPlaceInTheWindowBackWhenItIsGathered) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      Model model = stored_layers(1, /*offers=*/true);
      model.numels[0] = 16;
      CoordinatorOptions options = prefetch(0);
      options.persist_param_bytes = 64;
      options.persist_model_bytes = kUnlimitedBytes;
      RankWorld world(group, model, options);
      wait_for_updates(world);
      const std::vector<float> values(kLayerNumel);
      ShardLoader& loader = world.stored().loader();
      EXPECT_FALSE(loader.receive(3, 0, kLayerNumel, values.data())) << "p0 has the window";
      run_forward(world, {0});
      ASSERT_TRUE(world.coordinator().persists(0));
      EXPECT_EQ(world.params()[0].state(), ParamState::kAvailable);
      loader.wait_idle();
      EXPECT_TRUE(loader.receive(3, 0, kLayerNumel, values.data()));
      loader.forget(3);
      run_forward(world, kInOrder);
      world.end_step_and_update();
    });
  }
}

TEST(CoordinatorTierOrder, ADepartureForgetsWhatWasReadAheadInVain) {
  run_ranks(1, [](Group& group) {
    RankWorld world(group, stored_layers(2, /*offers=*/false), prefetch(0));
    run_forward(world, kInOrder);
    world.end_step_and_update();
    wait_for_updates(world);
    run_forward(world, {0});  // 1 and 2 are in the window
    world.begin(5, Phase::kForward);
    EXPECT_EQ(world.coordinator().trace_mode(), TraceMode::kInvalid);
    const std::vector<float> values(kLayerNumel);
    EXPECT_TRUE(world.stored().loader().receive(3, 0, kLayerNumel, values.data()));
    EXPECT_TRUE(world.stored().loader().receive(4, 0, kLayerNumel, values.data()));
    world.stored().loader().forget_all();
    world.end(5, Phase::kForward);
    run_forward(world, {1, 2});
  });
}

TEST(CoordinatorTierFailure, OneRankGoesOnAfterAReadThatFailed) {
  for (const std::int64_t bucket : {std::int64_t{0}, kLayerBytes}) {
    run_ranks(1, [&](Group& group) {
      Model model = stored_layers(2, /*offers=*/false);
      model.stored.ids = {0, 2, 3, 5};  // the others lie in memory
      model.units[3] = {3, 4};
      RankWorld world(group, model, prefetch(bucket));
      for (int step = 0; step < 3; ++step) {
        run_forward(world, kInOrder);
        world.stored().held_store().fail(StoreCall::kRead, "'p3'");
        world.end_step_and_update();
        expect_names<IoError>([&] { run_forward(world, kInOrder); }, "'p3'");
        world.coordinator().release_all();
        EXPECT_EQ(world.coordinator().full_bytes(), 0);
        EXPECT_EQ(world.coordinator().num_calls_in_flight(), 0U);
        world.stored().held_store().clear_rules();
      }
      run_forward(world, {3, 4, 5, 0, 3, 2, 3});
      world.end_step_and_update();
    });
  }
}

TEST(CoordinatorTierFailure, ADroppedReadThatFailedDoesNotStandInTheWayOfOthers) {
  run_ranks(1, [](Group& group) {
    RankWorld world(group, stored_layers(2, /*offers=*/false), prefetch(kLayerBytes));
    run_forward(world, kInOrder);
    world.stored().held_store().fail(StoreCall::kRead, "'p1'");
    world.end_step_and_update();
    run_forward(world, {0, 3, 4, 2, 5, 3, 0});  // 1 was gathered ahead, and is not needed
    world.coordinator().release_all();
    world.stored().held_store().clear_rules();
    run_forward(world, kInOrder);
    world.end_step_and_update();
  });
}

TEST(CoordinatorTierFailure, AReadThatFailsOnOneRankIsToldToAll) {
  run_ranks(3, [](Group& group) {
    RankWorld world(group, stored_layers(2, /*offers=*/false), prefetch(kLayerBytes));
    run_forward(world, kInOrder);
    if (group.rank() == 1) {
      world.stored().held_store().fail(StoreCall::kRead, "'p3'");
    }
    world.end_step_and_update();
    if (group.rank() == 1) {
      expect_names<IoError>([&] { run_forward(world, kInOrder); }, "'p3'");
    } else {
      EXPECT_THROW(run_forward(world, kInOrder), CommError);
    }
    world.coordinator().release_all();
    EXPECT_EQ(world.coordinator().full_bytes(), 0);
  });
}

TEST(CoordinatorTierFailure, AnUpdateThatFailedIsToldToItsUse) {
  for (const bool offers : {false, true}) {
    run_ranks(1, [&](Group& group) {
      RankWorld world(group, stored_layers(8, offers), prefetch(kLayerBytes));
      run_forward(world, kInOrder);
      world.stored().fail_update(2);
      world.end_step_and_update();
      run_forward(world, {0, 1});
      expect_names<IoError>([&] { run_forward(world, {2}); }, "the update of parameter 'p2'");
      world.coordinator().release_all();
      run_forward(world, {3, 0});
    });
  }
}

TEST(CoordinatorTierFailure, AWriteThatFailedIsToldToTheNextUseThatReads) {
  run_ranks(1, [](Group& group) {
    RankWorld world(group, stored_layers(0, /*offers=*/false), prefetch(kLayerBytes));
    run_forward(world, kInOrder);
    world.stored().held_store().fail(StoreCall::kWrite, "'p4'");
    world.end_step_and_update();
    expect_names<IoError>([&] { run_forward(world, kInOrder); }, "'p4'");
    world.coordinator().release_all();
    run_forward(world, {0, 1, 2, 3, 5});
  });
}

TEST(CoordinatorTierFailure, AStoredParameterWithoutAFeedIsRefused) {
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [](Group& group) {
      const std::unique_ptr<device::Device> device = make_device(DeviceChoice::kCpu, group.rank());
      shard::ParamTable params(group.rank(), group.size(), *device);
      shard::ParamSpec spec;
      spec.name = "w";
      spec.numel = 8;
      spec.placement.parameter = Tier::kNvme;
      const float* data = nullptr;
      params.add(spec, std::make_unique<PlainTensor>(&data));
      const SteadyClock clock;
      Spans spans(clock, 64);
      Coordinator coordinator({group, *device, params, clock, spans, Logger({}, {})}, prefetch(0));
      coordinator.add_unit("u", {0});
      expect_names<InternalError>([&] { coordinator.begin_use(0, Phase::kForward); }, "'w'");
    });
  }
}

// The coordinator goes while shards are on their way into its memory.
TEST(CoordinatorTierFailure, AWorldMayEndInTheMiddle) {
  for (const int num_ranks : {1, 2}) {
    for (int moment = 0; moment < 4; ++moment) {
      run_ranks(num_ranks, [&](Group& group) {
        RankWorld world(group, stored_layers(2, moment % 2 == 0), prefetch(kLayerBytes));
        run_forward(world, kInOrder);
        if (moment > 1) {
          world.stored().hold_update(1);
        }
        world.end_step_and_update();
        if (moment % 2 == 1) {
          world.begin(0, Phase::kForward);
        }
      });
    }
  }
}

}  // namespace
}  // namespace tessera::coordinator
