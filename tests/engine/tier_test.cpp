// Where shards live changes no bit: losses, norms, parameters and optimizer states of resident,
// host, NVMe and mixed placements; and books that say what the plan said.
#include <string>

#include <gtest/gtest.h>

#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

using Options = std::vector<std::pair<std::string, std::string>>;

struct Placed {
  std::string name;
  Options options;
};

// In the order of how little stays in memory.
std::vector<Placed> placements(const std::string& directory, const char* small_budget) {
  const std::pair<std::string, std::string> nvme{"nvme.paths", directory};
  // Nothing is measured: tests run side by side.
  const Options io{
      nvme, {"nvme.block_bytes", "64KiB"}, {"nvme.queue_depth", "4"}, {"nvme.threads", "2"}};
  const auto with = [&](Options more) {
    more.insert(more.end(), io.begin(), io.end());
    return more;
  };
  return {
      {"host", {{"place.parameters", "host"}, {"place.optimizer", "host"}}},
      {"optimizer", with({{"place.optimizer", "nvme"}})},
      {"parameters", with({{"place.parameters", "nvme"}})},
      {"nvme", with({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}})},
      {"verified", with({{"place.parameters", "nvme"},
                         {"place.optimizer", "nvme"},
                         {"nvme.verify", "true"},
                         {"nvme.engine", "threads"}})},
      {"budget", with({{"memory.host", small_budget}})},
  };
}

struct Case {
  int ranks = 1;
  int accumulate = 1;
  std::string kind = "adamw";
  DType dtype = DType::kFloat32;
  std::int64_t steps = 20;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& each = info.param;
  return each.kind + "_" + std::string(to_string(each.dtype)) + "_ranks" +
         std::to_string(each.ranks) + "_accumulate" + std::to_string(each.accumulate);
}

class Tiers : public ::testing::TestWithParam<Case> {};

TEST_P(Tiers, GiveTheSameBitsWhereverShardsLive) {
  const DiskDirectory directory;
  const Case& each = GetParam();
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = each.dtype;
  settings.model.vocabulary = 67;  // does not divide
  settings.ranks = each.ranks;
  settings.accumulate = each.accumulate;
  settings.steps = each.steps;
  settings.data = "random";
  const Options common{{"optim.kind", each.kind}, {"grad.clip_norm", "0.5"}};
  settings.options = common;
  const RunOutcome resident = train(settings);
  for (const Placed& placed : placements(directory.path(), "420KiB")) {
    settings.options = common;
    settings.options.insert(settings.options.end(), placed.options.begin(), placed.options.end());
    const RunOutcome moved = train(settings);
    EXPECT_TRUE(same_bits(moved, resident))
        << placed.name << ": " << difference(moved, resident).describe();
    EXPECT_EQ(moved.states.size(), moved.params.size());
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
}

INSTANTIATE_TEST_SUITE_P(Of, Tiers,
                         ::testing::Values(Case{1, 1}, Case{1, 3}, Case{2, 1}, Case{2, 3},
                                           Case{3, 1}, Case{3, 2}, Case{1, 1, "adam"},
                                           Case{2, 1, "sgd"}, Case{1, 2, "lion"},
                                           Case{1, 1, "adamw", DType::kBFloat16},
                                           Case{2, 2, "adamw", DType::kBFloat16},
                                           Case{3, 1, "lion", DType::kBFloat16}),
                         name_of);

// Bytes of NVMe per element and step.
TEST(TierBytes, AreTwentyFourForTheStatesAndNoneForWhatIsInMemory) {
  const DiskDirectory directory;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    RunSettings settings;
    settings.model = models::gpt_preset("micro");
    settings.model.dtype = dtype;
    settings.steps = 3;
    settings.ranks = 1;
    settings.gives_shapes = true;
    settings.options = placements(directory.path(), "1MiB")[3].options;
    const RunOutcome run = train(settings);
    ASSERT_TRUE(run.placement.has_value());
    const planner::StepBytes& planned = run.placement->step;
    // The first step reads no parameter that its update has just made.
    const EngineStats& last = run.stats.back();
    const std::uint64_t states = last.io.states.read_bytes + last.io.states.written_bytes;
    std::int64_t padded = 0;  // elements, in whole blocks of each shard
    for (const at::Tensor& param : run.params) {
      padded += (param.numel() + 1023) / 1024 * 1024;
    }
    const bool is_fp32 = dtype == DType::kFloat32;
    EXPECT_EQ(states, static_cast<std::uint64_t>(padded * (is_fp32 ? 16 : 24)));
    // In fp32 the parameter is the master: with it the update moves 24 bytes, too.
    EXPECT_EQ(planned.states_read + planned.states_written, padded * 24);
    EXPECT_LE(last.io.parameters.read_bytes + last.io.parameters.written_bytes,
              static_cast<std::uint64_t>(planned.parameters_read + planned.parameters_written) +
                  static_cast<std::uint64_t>(is_fp32 ? padded * 8 : 0));
  }
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.steps = 2;
  settings.options = placements(directory.path(), "64MiB")[5].options;
  const RunOutcome fits = train(settings);
  ASSERT_TRUE(fits.placement.has_value());
  EXPECT_FALSE(fits.placement->uses_nvme);
  EXPECT_EQ(fits.stats.back().io.states.read_bytes + fits.stats.back().io.parameters.read_bytes,
            0U);
}

TEST(TierBooks, SayWhatThePlanSaid) {
  const DiskDirectory directory;
  for (const int ranks : {1, 2}) {
    for (const char* budget : {"350KiB", "420KiB", "600KiB", "1MiB", "64MiB"}) {
      RunSettings settings;
      settings.model = models::gpt_preset("micro");
      settings.steps = 3;
      settings.ranks = ranks;
      settings.gives_shapes = true;
      settings.options = placements(directory.path(), budget)[5].options;
      const RunOutcome run = train(settings);
      ASSERT_TRUE(run.placement.has_value());
      EXPECT_LE(run.placement->memory_bytes(), run.placement->memory_budget_bytes);
      for (const auto& [cell, bytes] : run.peaks) {
        const auto [tier, role] = cell;
        if (tier == Tier::kDevice && role == Role::kStaging) {
          continue;  // of single numbers: the norm
        }
        EXPECT_EQ(bytes, run.placement->bytes(tier, role))
            << ranks << " ranks, " << budget << ": " << to_string(tier) << " " << to_string(role);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
