// Where shards live changes no bit: losses, norms, parameters and optimizer states of resident,
// host, NVMe and mixed placements; and books that say what the plan said.
#include <filesystem>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

std::vector<Placed> tiered_placements(const DiskDirectory& directory) {
  const Options io = nvme_in(directory);
  const Options all = joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, io);
  return {
      {"host", {{"place.parameters", "host"}, {"place.optimizer", "host"}}},
      {"optimizer", joined({{"place.optimizer", "nvme"}}, io)},
      {"parameters", joined({{"place.parameters", "nvme"}}, io)},
      {"nvme", all},
      {"small sub-groups", joined({{"optim.sub_group_bytes", "8KiB"}}, all)},
      {"one buffer", joined({{"nvme.optimizer_buffers", "1"}}, all)},
      {"in turn", joined({{"optim.sub_group_bytes", "8KiB"},
                          {"nvme.pipeline_read", "false"},
                          {"nvme.pipeline_write", "false"}},
                         all)},
      {"verified", joined({{"nvme.verify", "true"}, {"nvme.engine", "threads"}}, all)},
      {"mixed", joined({{"place.parameters_host_bytes", "40KiB"}}, all)},
  };
}

const std::vector<TrainedCase>& tiered_cases() {
  static const std::vector<TrainedCase> cases = {{1, 1},
                                                 {1, 3},
                                                 {2, 1},
                                                 {2, 3},
                                                 {3, 2},
                                                 {1, 1, "adam"},
                                                 {2, 1, "sgd"},
                                                 {3, 2, "lion"},
                                                 {1, 1, "adamw", DType::kBFloat16},
                                                 {2, 3, "adamw", DType::kBFloat16},
                                                 {3, 1, "lion", DType::kBFloat16}};
  return cases;
}

class Tiers : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Tiers, GiveTheSameBitsWhereverShardsLive) {
  const DiskDirectory directory;
  const TrainedCase& each = tiered_cases()[GetParam()];
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = each.dtype;
  settings.model.vocabulary = 67;  // does not divide
  settings.steps = 4;              // two are recorded, two follow the plan
  settings.batch = static_cast<std::int64_t>(each.ranks) * each.accumulate;
  settings.ranks = each.ranks;
  settings.accumulate = each.accumulate;
  settings.data = "random";
  Options common{{"optim.kind", each.kind}, {"grad.clip_norm", "0.5"}};
  if (each.kind == "sgd") {
    common.emplace_back("optim.momentum", "0.9");
  }
  settings.options = common;
  const RunOutcome resident = train(settings);
  for (const Placed& placed :
       places_of_case(tiered_placements(directory), GetParam(), {"nvme", "mixed"})) {
    settings.options = joined(common, placed.options);
    const RunOutcome moved = train(settings);
    EXPECT_TRUE(same_bits(moved, resident))
        << placed.name << ": " << difference(moved, resident).describe();
    EXPECT_EQ(moved.states.size(), moved.params.size());
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
}

INSTANTIATE_TEST_SUITE_P(Of, Tiers, ::testing::Range(std::size_t{0}, tiered_cases().size()),
                         [](const auto& info) { return name_of(tiered_cases()[info.param]); });

// Large enough against the smallest buffers that a budget has something to decide.
RunSettings budgeted(int ranks) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.width = 64;
  settings.model.vocabulary = 1021;
  settings.ranks = ranks;
  settings.steps = 5;
  settings.accumulate = 2;
  settings.data = "random";
  return settings;
}

// Four ranks on two hosts, with and without a budget.
TEST(TierBudgets, OfModesThatSendLessKeepTheBooksThatWerePlanned) {
  const Placed modes[] = {
      {"hpZ", {{"shard.secondary_group_size", "2"}}},
      {"qwZ", {{"quant.weights", "true"}}},
      {"hpZ of a frozen base in int4",
       {{"shard.secondary_group_size", "2"}, {"quant.frozen_bits", "4"}}},
      {"qgZ", {{"quant.gradients", "true"}}},
      {"hierarchical", {{"shard.hierarchical_gather", "true"}}},
      {"hierarchical qwZ", {{"shard.hierarchical_gather", "true"}, {"quant.weights", "true"}}},
      {"MiCS and qgZ", {{"shard.group_size", "2"}, {"quant.gradients", "true"}}},
      {"all",
       {{"shard.secondary_group_size", "2"},
        {"quant.weights", "true"},
        {"quant.gradients", "true"},
        {"quant.gradient_bits", "8"}}},
  };
  for (const Placed& mode : modes) {
    for (const char* budget : {"6MiB", "64MiB"}) {
      SCOPED_TRACE(mode.name + ", " + budget);
      RunSettings settings = budgeted(4);
      settings.batch = 8;
      settings.model.freeze = 1;
      settings.options =
          joined({{"comm.ranks_per_host", "2"}, {"memory.host", budget}}, mode.options);
      settings.gives_shapes = true;
      const RunOutcome run = train(settings);
      ASSERT_TRUE(run.placement.has_value());
      EXPECT_LE(run.placement->memory_bytes(), run.placement->memory_budget_bytes);
      for (const auto& [cell, bytes] : run.peaks) {
        const auto [tier, role] = cell;
        if (role != Role::kStaging || tier != Tier::kDevice) {  // single numbers, such as the norm
          EXPECT_EQ(bytes, run.placement->bytes(tier, role))
              << to_string(tier) << " " << to_string(role);
        }
      }
      EXPECT_EQ(run.comm_peak_bytes, settings.ranks * run.placement->comm_bytes);
    }
  }
}

TEST(TierBudgets, ChangeNoBitAndKeepTheBooksThatWerePlanned) {
  const DiskDirectory directory;
  for (const int ranks : {1, 2, 3}) {
    RunSettings settings = budgeted(ranks);
    const RunOutcome resident = train(settings);
    std::int64_t last_stored = std::numeric_limits<std::int64_t>::max();
    for (const char* budget : {"2000KiB", "2300KiB", "2900KiB", "64MiB"}) {
      settings.options = joined({{"memory.host", budget}}, nvme_in(directory));
      settings.gives_shapes = true;
      const RunOutcome run = train(settings);
      const std::string where = std::to_string(ranks) + " ranks, " + budget;
      EXPECT_TRUE(same_bits(run, resident)) << where << difference(run, resident).describe();
      ASSERT_TRUE(run.placement.has_value());
      EXPECT_LE(run.placement->memory_bytes(), run.placement->memory_budget_bytes) << where;
      const std::int64_t stored = run.placement->bytes(Tier::kNvme);
      EXPECT_LE(stored, last_stored) << where;
      for (std::size_t step = 1; step < run.stats.size(); ++step) {
        EXPECT_EQ(run.stats[step].gathers.arena_overflows, 0U) << where << ", step " << step;
      }
      last_stored = stored;
      for (const auto& [cell, bytes] : run.peaks) {
        const auto [tier, role] = cell;
        if (role == Role::kStaging && tier == Tier::kDevice) {
          continue;  // single numbers, such as the norm
        }
        EXPECT_EQ(bytes, run.placement->bytes(tier, role))
            << where << ": " << to_string(tier) << " " << to_string(role);
      }
      EXPECT_EQ(run.comm_peak_bytes, ranks * run.placement->comm_bytes) << where;
    }
    EXPECT_EQ(last_stored, 0) << "everything fits into the largest budget";
  }
}

TEST(TierBudgets, WithoutShapesShardsMoveWhenTheModelIsComplete) {
  const DiskDirectory directory;
  RunSettings settings = budgeted(2);
  const RunOutcome resident = train(settings);
  settings.options = joined({{"memory.host", "2000KiB"}}, nvme_in(directory));
  const RunOutcome run = train(settings);
  EXPECT_TRUE(same_bits(run, resident)) << difference(run, resident).describe();
  ASSERT_TRUE(run.placement.has_value());
  EXPECT_TRUE(run.placement->uses_nvme);
}

// Two runs that differ by some steps differ by the bytes of those steps.
engine::TierIo io_of_steps(RunSettings settings, std::int64_t steps) {
  settings.steps = 2;
  const engine::TierIo before = train(settings).io;
  settings.steps = 2 + steps;
  const engine::TierIo after = train(settings).io;
  const auto less = [](const engine::RoleIo& a, const engine::RoleIo& b) {
    return engine::RoleIo{a.read_bytes - b.read_bytes, a.written_bytes - b.written_bytes};
  };
  engine::TierIo io;
  io.parameters = less(after.parameters, before.parameters);
  io.gradients = less(after.gradients, before.gradients);
  io.states = less(after.states, before.states);
  return io;
}

TEST(TierBytes, AreTwentyFourPerElementAndStepForTheStates) {
  const DiskDirectory directory;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    RunSettings settings;
    settings.model = models::gpt_preset("micro");
    settings.model.dtype = dtype;
    settings.gives_shapes = true;
    settings.options = joined({{"place.parameters", "nvme"},
                               {"place.optimizer", "nvme"},
                               {"optim.sub_group_bytes", "8KiB"},
                               {"nvme.optimizer_buffers", "2"}},
                              nvme_in(directory));
    const engine::TierIo io = io_of_steps(settings, 3);
    std::uint64_t padded = 0;  // elements, in whole blocks of each shard
    settings.steps = 1;
    const RunOutcome run = train(settings);
    for (const at::Tensor& param : run.params) {
      padded += static_cast<std::uint64_t>((param.numel() + 1023) / 1024 * 1024);
    }
    const bool is_fp32 = dtype == DType::kFloat32;
    // In fp32 the parameter is the master: the update reads and writes it where it is.
    EXPECT_EQ(io.states.read_bytes, 3 * padded * (is_fp32 ? 8 : 12));
    EXPECT_EQ(io.states.written_bytes, 3 * padded * (is_fp32 ? 8 : 12));
    if (is_fp32) {
      EXPECT_EQ(io.parameters.written_bytes, 3 * padded * 4);
      EXPECT_GE(io.parameters.read_bytes, 3 * padded * 4);
    }
    ASSERT_TRUE(run.placement.has_value());
    const planner::StepBytes& planned = run.placement->step;
    EXPECT_EQ(planned.states_read + planned.states_written, static_cast<std::int64_t>(padded) * 24);
    EXPECT_LE(io.parameters.read_bytes, 3 * (static_cast<std::uint64_t>(planned.parameters_read) +
                                             (is_fp32 ? padded * 4 : 0)));
  }
}

TEST(TierBytes, AreNoneForWhatTheBudgetKeepsInMemory) {
  const DiskDirectory directory;
  RunSettings settings = budgeted(1);
  settings.options = joined({{"memory.host", "64MiB"}}, nvme_in(directory));
  const RunOutcome run = train(settings);
  ASSERT_TRUE(run.placement.has_value());
  EXPECT_FALSE(run.placement->uses_nvme);
  EXPECT_EQ(run.io.states.read_bytes + run.io.parameters.read_bytes + run.io.gradients.read_bytes,
            0U);
}

}  // namespace
}  // namespace tessera::testing
