// When what is read, updated and written: bytes, order, and who waits for whom.
#include "tessera/optim/update_pipeline.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "testing/thread_backend.h"
#include "tests/optim/tiered_world.h"

namespace tessera::optim {
namespace {

using testing::IoCall;
using testing::IoFault;

TieredCase on_disk(int num_params, std::int64_t numel, const StoredParts& stored) {
  TieredCase test;
  test.shapes.assign(static_cast<std::size_t>(num_params), {numel, stored});
  test.store = StoreKind::kFile;
  return test;
}

// What has been read so far, in the order of the calls.
std::vector<std::string> reads_of(const testing::FaultEngine& engine) {
  std::vector<std::string> names;
  for (const testing::SeenIo& io : engine.seen()) {
    if (io.call == IoCall::kRead) {
      names.push_back(io.what);
    }
  }
  return names;
}

TEST(UpdatePipeline, MovesTwentyFourBytesPerElementAndStep) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    constexpr std::int64_t kNumel = 5 * 2048;
    constexpr int kParams = 4;
    TieredCase test = on_disk(kParams, kNumel, kAllStored);
    test.dtype = dtype;
    test.num_buffers = 2;
    run_one(test, [&](TieredWorld& world) {
      world.step(1);
      world.tiered().take_stats();
      const tier::IoCounts before = world.engine().counts();
      world.step(2);
      const TieredStats stats = world.tiered().take_stats();
      constexpr std::uint64_t kAll = kParams * kNumel;
      if (dtype == DType::kFloat32) {
        EXPECT_EQ(stats.states_read_bytes + stats.parameters_read_bytes, 12 * kAll);
        EXPECT_EQ(stats.states_written_bytes + stats.parameters_written_bytes, 12 * kAll);
      } else {
        EXPECT_EQ(stats.states_read_bytes, 12 * kAll);
        EXPECT_EQ(stats.states_written_bytes, 12 * kAll);
        EXPECT_EQ(stats.parameters_read_bytes, 0U);
        EXPECT_EQ(stats.parameters_written_bytes, 2 * kAll);
      }
      EXPECT_EQ(stats.gradients_read_bytes, 4 * kAll);
      // Gradients are written once by the reducer. Nothing else touches the disk.
      const tier::IoCounts after = world.engine().counts();
      EXPECT_EQ(after.read_bytes - before.read_bytes,
                stats.states_read_bytes + stats.parameters_read_bytes + stats.gradients_read_bytes);
      EXPECT_EQ(after.written_bytes - before.written_bytes,
                stats.states_written_bytes + stats.parameters_written_bytes + 4 * kAll);
      const SubGroupPlan& plan = world.tiered().plan();
      EXPECT_EQ(plan.states_read_bytes, stats.states_read_bytes);
      EXPECT_EQ(plan.states_written_bytes, stats.states_written_bytes);
      EXPECT_EQ(plan.parameters_read_bytes, stats.parameters_read_bytes);
      EXPECT_EQ(plan.parameters_written_bytes, stats.parameters_written_bytes);
    });
  }
}

TEST(UpdatePipeline, MovesNothingOfWhatIsInMemory) {
  run_one(on_disk(3, 4096, {}), [](TieredWorld& world) {
    world.step(1);
    EXPECT_TRUE(world.engine().seen().empty());
    EXPECT_EQ(world.tiered().take_stats().states_read_bytes, 0U);
  });
}

TEST(UpdatePipeline, DoesNotReadAgainWhatItStillHolds) {
  constexpr int kParams = 8;
  TieredCase test = on_disk(kParams, 2048, kAllStored);
  constexpr std::uint64_t kGroupBytes = 2 * 4 * 2048;
  for (const int num_buffers : {1, 3, 5, 8}) {
    SCOPED_TRACE(std::to_string(num_buffers) + " buffers");
    test.num_buffers = num_buffers;
    const int num_kept = num_buffers == kParams ? kParams : std::max(num_buffers - 3, 0);
    run_one(test, [&](TieredWorld& world) {
      world.step(1);
      EXPECT_EQ(world.tiered().take_stats().states_read_bytes, kParams * kGroupBytes);
      for (const int step : {2, 3}) {
        world.step(step);
        const TieredStats stats = world.tiered().take_stats();
        EXPECT_EQ(stats.states_read_bytes,
                  static_cast<std::uint64_t>(kParams - num_kept) * kGroupBytes);
        EXPECT_EQ(stats.states_written_bytes, kParams * kGroupBytes);
      }
      world.tiered().reset_master(0);
      world.step(4);
      EXPECT_EQ(world.tiered().take_stats().states_read_bytes, kParams * kGroupBytes);
    });
  }
}

TEST(UpdatePipeline, UpdatesInTheOrderOfRegistration) {
  std::vector<std::pair<int, std::int64_t>> updated;
  TieredCase test = on_disk(0, 0, kAllStored);
  test.shapes = {{100, kAllStored}, {5000, kAllStored}, {2048, kAllStored}, {3, kAllStored}};
  test.num_buffers = 3;
  test.on_updated = [&](int id, std::int64_t begin, std::int64_t, const void*) {
    updated.emplace_back(id, begin);
    return false;
  };
  run_one(test, [&](TieredWorld& world) {
    world.step(1);
    EXPECT_EQ(updated, (std::vector<std::pair<int, std::int64_t>>{
                           {0, 0}, {1, 0}, {1, 2048}, {1, 4096}, {2, 0}, {3, 0}}));
  });
}

TEST(UpdatePipeline, HandsOutTheNewValuesThatItWrites) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::byte> handed_out;
    TieredCase test = on_disk(1, 5000, kAllStored);
    test.dtype = dtype;
    test.on_updated = [&](int, std::int64_t, std::int64_t numel, const void* values) {
      const auto* begin = static_cast<const std::byte*>(values);
      handed_out.insert(handed_out.end(), begin,
                        begin + static_cast<std::size_t>(numel) * bytes_of(dtype));
      return true;
    };
    run_one(test, [&](TieredWorld& world) {
      world.step(1);
      std::vector<std::byte> stored = world.stored_shard(0);
      stored.resize(world.params()[0].layout().shard_bytes());
      EXPECT_EQ(handed_out, stored);
    });
  }
}

TEST(UpdatePipeline, FinishesAParameterWhileLaterOnesAreStillOnTheDisk) {
  TieredCase test = on_disk(4, 2048, kStates);
  test.num_buffers = 2;
  run_one(test, [&](TieredWorld& world) {
    world.backward(1);
    world.engine().set_where_named(IoCall::kRead, "parameter 'p2'", IoFault::kHold);
    world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
    world.params()[0].updated().wait();
    world.params()[1].updated().wait();
    world.engine().wait_until_held(1);
    EXPECT_FALSE(world.params()[2].updated().done());
    EXPECT_FALSE(world.params()[3].updated().done());
    world.engine().clear_faults();
    world.engine().release();
    world.params()[3].updated().wait();
    world.optimizer().wait();
  });
}

TEST(UpdatePipeline, FinishesAStoredParameterWhenItIsWrittenOrKept) {
  for (const bool is_kept : {false, true}) {
    TieredCase test = on_disk(2, 4096, kAllStored);
    test.num_buffers = 4;
    test.on_updated = [is_kept](int id, std::int64_t, std::int64_t, const void*) {
      return is_kept && id == 0;
    };
    run_one(test, [&](TieredWorld& world) {
      world.backward(1);
      world.engine().set_where_named(IoCall::kWrite, "parameter 'p0'", IoFault::kDelay);
      world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
      world.params()[1].updated().wait();  // behind it, and written
      EXPECT_EQ(world.params()[0].updated().done(), is_kept);
      EXPECT_EQ(world.params()[0].updated().wait_for(std::chrono::nanoseconds(0)), is_kept);
      world.engine().clear_faults();
      world.engine().release();
      world.optimizer().wait();
      EXPECT_TRUE(world.params()[0].updated().done());
    });
  }
}

TEST(UpdatePipeline, ReadsStatesAheadOfTheGradientsAsFarAsLeasesGo) {
  TieredCase test = on_disk(4, 2048, kStates);
  test.num_buffers = 2;
  run_one(test, [&](TieredWorld& world) {
    world.optimizer().prepare();
    world.optimizer().wait();
    EXPECT_EQ(
        reads_of(world.engine()),
        (std::vector<std::string>{"exp_avg of parameter 'p0' to exp_avg_sq of parameter 'p0'",
                                  "exp_avg of parameter 'p1' to exp_avg_sq of parameter 'p1'"}));
    world.optimizer().prepare();  // of a step that was given up
    world.step(1);
    EXPECT_EQ(world.tiered().take_stats().states_read_bytes, 4U * 2 * 4 * 2048);
  });
}

TEST(UpdatePipeline, ReadsTheNextSubGroupWhileOneIsWritten) {
  TieredCase test = on_disk(3, 2048, kStates);
  test.num_buffers = 2;
  run_one(test, [&](TieredWorld& world) {
    world.backward(1);
    world.engine().set_where_named(IoCall::kWrite, "parameter 'p0'", IoFault::kHold);
    world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
    world.params()[1].updated().wait();  // read and updated while p0 is not written yet
    EXPECT_EQ(world.engine().num_held(), 1U);
    world.engine().clear_faults();
    world.engine().release();
    world.optimizer().wait();
  });
}

TEST(UpdatePipeline, RunsInTurnWhereItMayNeitherReadAheadNorWriteBehind) {
  constexpr int kParams = 8;
  TieredCase test = on_disk(kParams, 2048, kStates);
  test.num_buffers = 3;
  test.reads_ahead = false;
  test.writes_behind = false;
  run_one(test, [&](TieredWorld& world) {
    world.step(1);
    const std::vector<testing::SeenIo> seen = world.engine().seen();
    ASSERT_EQ(seen.size(), 2U * kParams);
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i].call, i % 2 == 0 ? IoCall::kRead : IoCall::kWrite) << seen[i].what;
    }
    EXPECT_EQ(world.buffers().peak_bytes(), world.tiered().plan().max_lease_bytes);
  });
}

TEST(UpdatePipeline, HoldsNoMoreThanItsBuffersAndChargesWhatIsInMemory) {
  TieredCase test = on_disk(3, 20000, kStates);
  test.shapes.push_back({5000, {}});
  test.num_buffers = 2;
  test.store = StoreKind::kFile;
  run_one(test, [&](TieredWorld& world) {
    world.step(1);
    const SubGroupPlan& plan = world.tiered().plan();
    EXPECT_EQ(world.buffers().capacity_bytes(), 2 * plan.max_lease_bytes);
    EXPECT_EQ(world.ledger().current_bytes(Tier::kNvme, Role::kOptimizer),
              plan.stored_states_bytes);
    EXPECT_EQ(world.ledger().current_bytes(Tier::kDevice, Role::kOptimizer), plan.states_bytes[3]);
    EXPECT_EQ(plan.states_bytes[3], 2U * 5 * 4096);
  });
}

TEST(UpdatePipeline, NamesEveryExtentOfTheStates) {
  TieredCase test = on_disk(0, 0, kStates);
  test.shapes = {{2048, kStates}, {3000, kStates}};
  test.dtype = DType::kBFloat16;
  run_one(test, [&](TieredWorld& world) {
    std::vector<std::string> names;
    for (const tier::StoreExtent& extent : world.states().extents()) {
      names.push_back(extent.name);
    }
    EXPECT_EQ(names, (std::vector<std::string>{
                         "master of parameter 'p0'", "exp_avg of parameter 'p0'",
                         "exp_avg_sq of parameter 'p0'",
                         "master of parameter 'p1' from element 0 of its shard",
                         "exp_avg of parameter 'p1' from element 0 of its shard",
                         "exp_avg_sq of parameter 'p1' from element 0 of its shard",
                         "master of parameter 'p1' from element 2048 of its shard",
                         "exp_avg of parameter 'p1' from element 2048 of its shard",
                         "exp_avg_sq of parameter 'p1' from element 2048 of its shard"}));
  });
}

TEST(UpdatePipeline, RefusesBuffersThatDoNotHoldASubGroup) {
  TieredCase test = on_disk(1, 4096, kAllStored);
  test.num_buffers = 0.5;
  comm::run_ranks(1, [&](comm::Group& group) {
    try {
      TieredWorld world(group, test);
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_NE(
          std::string(error.what()).find("the largest sub-group of the optimizer needs 32768"),
          std::string::npos)
          << error.what();
    }
  });
}

TEST(UpdatePipeline, EndsWhatIsRunningWhenTheOptimizerGoes) {
  TieredCase test = on_disk(6, 4096, kAllStored);
  test.num_buffers = 2;
  run_one(test, [&](TieredWorld& world) {
    world.backward(1);
    world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
    world.optimizer().prepare();
    world.destroy_optimizer();
    for (int id = 0; id < world.params().num_params(); ++id) {
      EXPECT_TRUE(world.params()[id].updated().done());
      world.params()[id].updated().wait();
    }
    EXPECT_EQ(world.buffers().free_bytes(), world.buffers().capacity_bytes());
  });
}

}  // namespace
}  // namespace tessera::optim
