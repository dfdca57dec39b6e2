// A save beside others' work: what updates overwrite while it is written, ranks that are done
// before others, a rank whose part fails, and how much memory is set aside.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "testing/fault_engine.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

// The disks of ranks, one each: what its saves write goes through it.
class Disks {
 public:
  explicit Disks(int num_ranks) : engines_(static_cast<std::size_t>(num_ranks)) {}

  // What happens to a disk when it is first used.
  std::function<void(int rank, FaultEngine& disk)> prepare = [](int, FaultEngine&) {};

  RuntimeOptions options(int rank) {
    RuntimeOptions options{-1, 1};
    options.wrap_io = [this, rank](std::unique_ptr<tier::IoEngine> inner) {
      auto disk = std::make_unique<FaultEngine>(std::move(inner));
      prepare(rank, *disk);
      const std::lock_guard<std::mutex> lock(mutex_);
      engines_[static_cast<std::size_t>(rank)] = disk.get();
      return disk;
    };
    return options;
  }
  FaultEngine* of(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return engines_[static_cast<std::size_t>(rank)];
  }
  void let_go(int rank) {
    if (FaultEngine* const disk = of(rank)) {
      disk->clear_faults();
      disk->release();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<FaultEngine*> engines_;  // guarded by mutex_; null: not used yet
};

void hold_writes(FaultEngine& disk) { disk.set_where_named(IoCall::kWrite, "", IoFault::kHold); }

// A rank that waits for another's disk fails soon, and lets go of the disks, so that all ranks end.
void run_on(Disks& disks, int num_ranks, const Config& config,
            const std::function<void(Engine&, comm::Group&)>& body) {
  comm::ThreadWorldOptions world;
  world.num_ranks = num_ranks;
  comm::GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  comm::run_ranks(world, options, [&](comm::Group& group) {
    Runtime runtime(config, group, disks.options(group.rank()));
    Engine engine(runtime);
    try {
      body(engine, group);
    } catch (...) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        disks.let_go(rank);
      }
      throw;
    }
  });
}

// More than what a save reads ahead of the disk: staging and tiles. What is being read cannot be
// set aside, so no update changes it.
struct LargeFrozenImpl : torch::nn::Module {
  LargeFrozenImpl() {
    weight = register_parameter("weight", at::full({4096, 4096}, 1e-3), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

TEST(SaveStages, WhatAnUpdateOverwritesBeforeItIsOnDiskIsSavedAsItWas) {
  const MemoryDirectory folder;
  Disks disks(1);
  disks.prepare = [](int, FaultEngine& disk) { hold_writes(disk); };
  run_on(disks, 1, adam_config(0.05), [&](Engine& engine, comm::Group&) {
    auto large = engine.unit("large", std::make_shared<LargeFrozenImpl>());
    auto small = engine.unit("small", affine(4096, 4, 1));
    const int id = id_of(engine, "small.weight");
    const auto step = [&] {
      train_step(engine, small(large(at::full({1, 4096}, 0.1))).pow(2).mean());
    };
    const auto moment = [&] {
      const std::span<float> values = engine.optimizer().state(id, "exp_avg");
      return std::vector<float>(values.begin(), values.end());
    };
    step();
    const at::Tensor value = engine.full_value(id);
    const std::vector<float> average = moment();
    engine.start_save(folder.path().string());
    disks.of(0)->wait_until_held(1);
    step();
    step();
    EXPECT_GT(disks.of(0)->num_held(), 0U);
    EXPECT_FALSE(engine.take_save_outcome()) << "the save was over before an update had to ask";
    EXPECT_FALSE(at::equal(engine.full_value(id), value));
    EXPECT_NE(moment(), average);
    disks.let_go(0);
    const std::optional<SaveOutcome> saved = engine.finish_save();
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->failure, "");
    EXPECT_EQ(engine.load(folder.path().string()).step, 1);
    EXPECT_TRUE(at::equal(engine.full_value(id), value));
    EXPECT_EQ(moment(), average);
  });
}

TEST(SaveStages, ARankThatHasWrittenItsPartWaitsForAnothersDiskInManyCollectivesNotInOne) {
  for (const bool is_beside : {false, true}) {
    const MemoryDirectory folder;
    Disks disks(2);
    disks.prepare = [](int rank, FaultEngine& disk) {
      if (rank == 0) {
        hold_writes(disk);
      }
    };
    Config config = quiet_config();
    config.set("comm.timeout_s", 0.05);  // so votes are a tenth of that apart
    std::atomic<bool> is_over{false};
    run_on(disks, 2, config, [&](Engine& engine, comm::Group& group) {
      auto layer = engine.unit("layer", affine(4, 4, 1));
      train_step(engine, layer(input(3, 4, 0)).pow(2).mean());
      if (is_beside) {
        engine.start_save(folder.path().string());
      }
      std::thread watching;
      if (group.rank() == 0) {
        watching = std::thread([&] {
          const auto wait_for = [&](const auto& is_so) {
            while (!is_over && !is_so()) {
              std::this_thread::yield();
            }
          };
          wait_for([&] { return disks.of(0) != nullptr && disks.of(0)->num_held() > 0; });
          constexpr std::uint64_t kManyVotes = 20;
          const std::uint64_t before = engine.group().wire_bytes().num_calls;
          wait_for([&] { return engine.group().wire_bytes().num_calls >= before + kManyVotes; });
          disks.let_go(0);
        });
      }
      std::string path;
      try {
        path = is_beside ? engine.finish_save()->path : engine.save(folder.path().string());
      } catch (...) {
        is_over = true;
        if (watching.joinable()) {
          watching.join();
        }
        throw;
      }
      is_over = true;
      if (watching.joinable()) {
        watching.join();
      }
      EXPECT_EQ(path, folder.path() / "save-00001-step-1");
    });
  }
}

TEST(SaveStages, APartThatFailsEndsTheSaveWhileAnotherRanksDiskStands) {
  const MemoryDirectory folder;
  Disks disks(2);
  disks.prepare = [](int rank, FaultEngine& disk) {
    if (rank == 0) {
      hold_writes(disk);
    } else {
      disk.set_nth(IoCall::kWrite, 0, IoFault::kFail);
    }
  };
  run_on(disks, 2, quiet_config(), [&](Engine& engine, comm::Group& group) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    const auto step = [&] { train_step(engine, layer(input(3, 4, 0)).pow(2).mean()); };
    step();
    engine.start_save(folder.path().string());
    if (group.rank() == 0) {
      disks.of(0)->wait_until_held(1);
    }
    std::optional<SaveOutcome> outcome;
    while (!outcome) {
      step();
      outcome = engine.take_save_outcome();
    }
    EXPECT_EQ(outcome->path, "");
    EXPECT_NE(outcome->failure.find("injected by a test"), std::string::npos) << outcome->failure;
    if (group.rank() == 0) {
      EXPECT_GT(disks.of(0)->num_held(), 0U) << "it has waited for its disk";
      disks.let_go(0);
    }
    step();
    engine.save(folder.path().string());
  });
  EXPECT_EQ(checkpoint::list_saves(folder.path().string()).size(), 1U);
}

// Threads, pinned memory, disks that cannot be opened: of one rank alone.
TEST(SaveStages, WhatARankLacksForASaveCostsTheSaveAndNotTheRun) {
  const MemoryDirectory folder;
  Disks disks(2);
  std::atomic<int> num_tries{0};
  disks.prepare = [&](int rank, FaultEngine&) {
    if (rank == 1 && num_tries++ == 0) {
      throw std::system_error(EAGAIN, std::generic_category(), "no thread");
    }
  };
  run_on(disks, 2, quiet_config(), [&](Engine& engine, comm::Group& group) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    const auto step = [&] { train_step(engine, layer(input(3, 4, 0)).pow(2).mean()); };
    step();
    try {
      engine.start_save(folder.path().string());
      FAIL() << "expected an error";
    } catch (const IoError& error) {
      EXPECT_EQ(group.rank(), 1);
      EXPECT_NE(std::string(error.what()).find("cannot begin it: no thread"), std::string::npos)
          << error.what();
    } catch (const ConfigError& error) {
      EXPECT_EQ(group.rank(), 0);
      EXPECT_NE(std::string(error.what()).find("rank 1 cannot"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(engine.finish_save());
    step();
    EXPECT_EQ(engine.save(folder.path().string()), folder.path() / "save-00001-step-2");
  });
}

TEST(SaveStages, TheBufferIsWhatTheBudgetLeavesAtEverySave) {
  const MemoryDirectory folder;
  const auto train = [&](const std::string& budget, const auto& look) {
    Config config = adam_config(0.05);
    config.apply_flag("memory.host=" + budget);
    with_engines(1, config, [&](Engine& engine, comm::Group&) {
      auto layer = engine.unit("layer", affine(512, 512, 1));
      const auto step = [&] { train_step(engine, layer(input(3, 512, 0)).pow(2).mean()); };
      step();
      ASSERT_NE(engine.memory_plan(), nullptr);
      look(engine, *engine.memory_plan(), step);
    });
  };
  std::int64_t planned = 0;
  train("1GiB", [&](Engine&, const planner::MemoryPlan& plan, const auto&) {
    planned = plan.host_memory_bytes();
  });
  const std::int64_t budget = planned + (std::int64_t{512} << 10);
  train(std::to_string(budget),
        [&](Engine& engine, const planner::MemoryPlan& plan, const auto& step) {
          const std::int64_t left = budget - plan.host_memory_bytes();
          ASSERT_GE(left, 4096);
          for (int save = 0; save < 3; ++save) {
            const SavePrediction expected = engine.start_save(folder.path().string());
            EXPECT_GT(expected.bytes, 2 * left) << "it is not larger than what is left";
            EXPECT_LE(expected.buffer_bytes, left) << "save " << save;
            EXPECT_GT(expected.buffer_bytes, left - 4096) << "save " << save;
            step();
            EXPECT_EQ(engine.finish_save()->failure, "");
          }
        });
}

TEST(SaveStages, FrozenParametersNeedNoBufferAndCostNoWaiting) {
  const MemoryDirectory folder;
  with_engines(1, adam_config(0.05), [&](Engine& engine, comm::Group&) {
    auto frozen = engine.unit("frozen", affine(512, 512, 1, /*trainable=*/false));
    auto trained = engine.unit("trained", affine(512, 4, 2));
    const auto step = [&] { train_step(engine, trained(frozen(input(3, 512, 0))).pow(2).mean()); };
    step();
    // Of weight and bias value and two moments, each in whole steps of 2048 elements.
    constexpr std::int64_t kTrainedBytes = 2 * 3 * 2048 * 4;
    const SavePrediction expected =
        engine.start_save(folder.path().string(), {.memory_bytes = std::int64_t{64} << 20});
    EXPECT_GT(expected.bytes, 512 * 512 * 4);
    EXPECT_EQ(expected.buffer_bytes, kTrainedBytes);
    EXPECT_EQ(expected.stall_s, 0);
    step();
    EXPECT_EQ(engine.finish_save()->failure, "");
  });
}

}  // namespace
}  // namespace tessera::testing
