// What `tessera inspect` foretells against what training does, with ranks as threads.
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cli/inspect.h"
#include "cli/inspect_mesh.h"
#include "models/gpt.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"
#include "testing/thread_backend.h"
#include "tests/engine/training_run.h"

namespace tessera::cli {
namespace {

using testing::RunOutcome;
using testing::RunSettings;

struct Case {
  std::string name;
  int ranks = 2;
  int accumulate = 1;
  std::int64_t freeze = 0;
  bool recompute = false;
  bool tie_head = false;
  bool adapters = false;  // over a frozen base
  std::vector<std::pair<std::string, std::string>> options = {};
  friend void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }
};

constexpr std::int64_t kLayers = 6;

models::GptOptions model_of(const Case& each) {
  models::GptOptions model = models::gpt_preset("micro");
  model.layers = kLayers;
  model.freeze = each.freeze;
  model.recompute = each.recompute;
  model.tie_head = each.tie_head;
  model.adapter_rank = each.adapters ? 4 : 0;
  model.adapter_alpha = 8;
  model.freeze_base = each.adapters;
  return model;
}

StepPlanInput input_of(const Case& each) {
  TrainFlags flags;
  flags.preset = "micro";
  flags.layers = std::to_string(kLayers);
  flags.freeze = std::to_string(each.freeze);
  flags.recompute = each.recompute;
  flags.tie_head = each.tie_head;
  flags.adapters = each.adapters ? "4" : "";
  flags.accumulate = std::to_string(each.accumulate);
  for (const auto& [name, value] : each.options) {
    flags.config.settings.push_back(name + "=" + value);
  }
  return checked_step_input(flags, each.ranks);
}

// A block is about 50 KiB, the head 8 KiB, the embedding 10 KiB.
std::vector<Case> cases() {
  return {
      {.name = "Defaults"},
      {.name = "Alone", .ranks = 1},
      {.name = "NoRoom", .options = {{"live.limit_bytes", "0"}}},
      {.name = "RoomForTwoBlocks",
       .options = {{"live.limit_bytes", "110KiB"}, {"persist.param_bytes", "0"}}},
      {.name = "RoomForThreeBlocksAndSomePersist",
       .ranks = 3,
       .options = {{"live.limit_bytes", "160KiB"},
                   {"persist.param_bytes", "256"},
                   {"live.reuse_distance_bytes", "0"}}},
      {.name = "SmallCalls",
       .options = {{"prefetch.bucket_bytes", "20KiB"},
                   {"prefetch.max_inflight", "2"},
                   {"live.limit_bytes", "200KiB"}}},
      {.name = "NoPrefetch",
       .options = {{"prefetch.bucket_bytes", "0"}, {"live.limit_bytes", "120KiB"}}},
      {.name = "TiedFrozenRecomputed",
       .ranks = 3,
       .freeze = 2,
       .recompute = true,
       .tie_head = true,
       .options = {{"live.limit_bytes", "110KiB"}}},
      {.name = "Adapters",
       .adapters = true,
       .options = {{"live.limit_bytes", "120KiB"}, {"persist.param_bytes", "0"}}},
      {.name = "AdaptersOfTheLastBlocks",
       .ranks = 3,
       .accumulate = 2,
       .freeze = 2,
       .recompute = true,
       .adapters = true,
       .options = {{"live.limit_bytes", "120KiB"}}},
      {.name = "Accumulated",
       .accumulate = 3,
       .options = {{"live.limit_bytes", "110KiB"}, {"persist.param_bytes", "1KiB"}}},
      {.name = "AccumulatedWithUnevenData",
       .accumulate = 3,
       .options = {{"live.limit_bytes", "110KiB"},
                   {"persist.param_bytes", "1KiB"},
                   {"unit.uneven_data", "true"}}},
  };
}

class Foretold : public ::testing::TestWithParam<Case> {};

TEST_P(Foretold, AStepGathersWhatWasPlanned) {
  const Case& each = GetParam();
  RunSettings settings;
  settings.model = model_of(each);
  settings.ranks = each.ranks;
  settings.accumulate = each.accumulate;
  settings.batch = 18;
  settings.steps = 3;
  settings.data = "random";
  settings.options = each.options;
  const RunOutcome run = testing::train(settings);
  const StepTotals& step = plan_step(input_of(each)).step;
  // The first step is recorded; what it gathers ahead belongs to the second.
  for (const std::size_t i : {1U, 2U}) {
    const coordinator::CoordinatorStats& gathers = run.stats.at(i).gathers;
    EXPECT_EQ(static_cast<std::int64_t>(gathers.num_gathers), step.num_gathers) << "step " << i;
    EXPECT_EQ(static_cast<std::int64_t>(gathers.gathered_bytes), step.gathered_bytes)
        << "step " << i;
    EXPECT_EQ(static_cast<std::int64_t>(gathers.prefetch_misses), step.num_misses) << "step " << i;
    EXPECT_EQ(gathers.full_bytes_peak, step.peak_bytes) << "step " << i;
    EXPECT_EQ(gathers.prefetch_drops, 0U) << "step " << i;
  }
}

TEST_P(Foretold, TheEngineTakesTheMemoryThatWasPlanned) {
  const Case& each = GetParam();
  const StepPlan plan = plan_step(input_of(each));
  RunSettings settings;
  settings.model = model_of(each);
  settings.options = each.options;
  comm::run_ranks(each.ranks, [&](comm::Group& group) {
    Runtime runtime(testing::config_of(settings), group, {-1, 1});
    Engine engine(runtime);
    models::Gpt model(settings.model, engine, settings.seed);
    engine.optimizer();  // the model is complete
    EXPECT_EQ(static_cast<std::int64_t>(engine.coordinator().arena_bytes()), plan.arena_bytes);
    std::int64_t shard_bytes = 0;
    for (int id = 0; id < engine.num_params(); ++id) {
      shard_bytes += static_cast<std::int64_t>(engine.param(id).layout().shard_bytes());
      EXPECT_EQ(engine.coordinator().persists(id), plan.persists[static_cast<std::size_t>(id)])
          << engine.param(id).name();
    }
    EXPECT_EQ(shard_bytes, plan.shard_bytes);
  });
}

// Two hosts of two ranks; backward gathers again.
std::vector<Case> cases_of_modes() {
  const std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>>
      modes = {
          {"Plain", {}},
          {"Hierarchical", {{"shard.hierarchical_gather", "true"}}},
          {"Mics", {{"shard.group_size", "2"}}},
          {"Hpz", {{"shard.secondary_group_size", "2"}}},
          {"HpzQuantised", {{"shard.secondary_group_size", "2"}, {"quant.weights", "true"}}},
          {"HpzStored", {{"shard.secondary_group_size", "2"}, {"quant.frozen_bits", "4"}}},
          {"HierarchicalHpz",
           {{"shard.hierarchical_gather", "true"}, {"shard.secondary_group_size", "2"}}},
      };
  std::vector<Case> all;
  for (const auto& [name, options] : modes) {
    Case each{.name = name, .ranks = 4, .options = options};
    each.options.insert(each.options.end(), {{"comm.ranks_per_host", "2"},
                                             {"live.limit_bytes", "110KiB"},
                                             {"persist.param_bytes", "1KiB"}});
    all.push_back(each);
    each.name += "AccumulatedFrozen";
    each.accumulate = 3;
    each.freeze = 2;
    each.tie_head = true;
    all.push_back(each);
  }
  // Two copies, each over two hosts of two ranks.
  Case both{.name = "MicsHpz", .ranks = 8};
  both.options = {{"shard.group_size", "4"},
                  {"shard.secondary_group_size", "2"},
                  {"shard.hierarchical_gather", "true"},
                  {"comm.ranks_per_host", "2"},
                  {"live.limit_bytes", "110KiB"},
                  {"persist.param_bytes", "1KiB"}};
  all.push_back(both);
  return all;
}

class ForetoldBytes : public ::testing::TestWithParam<Case> {};

TEST_P(ForetoldBytes, AreThoseThatRanksCountPerLink) {
  const Case& each = GetParam();
  RunSettings settings;
  settings.model = model_of(each);
  settings.ranks = each.ranks;
  settings.accumulate = each.accumulate;
  settings.batch = 24;
  settings.steps = 4;
  settings.data = "random";
  settings.options = each.options;
  settings.options.emplace_back("batch.accumulate", std::to_string(each.accumulate));
  const RunOutcome run = testing::train(settings);
  const StepPlanInput input = input_of(each);
  const planner::MeshChoice own = compare_meshes(input, plan_step(input), std::nullopt).own;
  EXPECT_EQ(own.modes.secondary_size > 1, own.bytes.secondary_gathers.sum() > 0);
  constexpr std::int64_t kSmall = 4096;  // norms and what ranks agree on
  for (const std::size_t i : {2U, 3U}) {
    const EngineStats& stats = run.stats.at(i);
    EXPECT_EQ(static_cast<std::int64_t>(stats.gathered_wire_bytes),
              own.bytes.gathers.sum() + own.bytes.secondary_gathers.sum())
        << "step " << i;
    EXPECT_EQ(static_cast<std::int64_t>(stats.reduced_wire_bytes),
              own.bytes.reduce_scatters.sum() + own.bytes.replica_sums.sum())
        << "step " << i;
    const auto inside = static_cast<std::int64_t>(stats.sent_inside_bytes);
    const auto across = static_cast<std::int64_t>(stats.sent_across_bytes);
    EXPECT_GE(inside, own.bytes.rank().inside) << "step " << i;
    EXPECT_LE(inside, own.bytes.rank().inside + kSmall) << "step " << i;
    EXPECT_GE(across, own.bytes.rank().across) << "step " << i;
    EXPECT_LE(across, own.bytes.rank().across + kSmall) << "step " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Inspect, ForetoldBytes, ::testing::ValuesIn(cases_of_modes()),
                         [](const auto& info) { return info.param.name; });

// On the late double, which is a CPU with memory of its own: what lives in host memory is gathered
// in a group of one, too.
TEST(ForetoldOnOwnMemory, AStepGathersWhatWasPlanned) {
  using Options = std::vector<std::pair<std::string, std::string>>;
  const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
  Options tight = host;
  tight.emplace_back("live.limit_bytes", "5MiB");  // a block has 3 MiB, the head 4
  const Options optimizer{{"place.parameters", "device"}, {"place.optimizer", "host"}};
  for (const Options& options : {host, tight, optimizer}) {
    TrainFlags flags;
    flags.preset = "small";
    flags.layers = "2";
    flags.sequence = "16";
    flags.device = "cuda";
    RunSettings settings;
    settings.model = models::gpt_preset("small");
    settings.model.layers = 2;
    settings.model.sequence = 16;
    settings.batch = 2;
    settings.steps = 3;
    settings.data = "random";
    settings.device = testing::RunDevice::kMock;
    settings.gives_shapes = true;
    settings.options = options;
    settings.options.emplace_back("optim.cpu_share", "0.5");
    for (const auto& [name, value] : settings.options) {
      flags.config.settings.push_back(name + "=" + value);
    }
    const RunOutcome run = testing::train(settings);
    const StepTotals& step = plan_step(checked_step_input(flags, 1)).step;
    EXPECT_EQ(step.num_gathers > 0, options != optimizer);
    for (const std::size_t i : {1U, 2U}) {
      const coordinator::CoordinatorStats& gathers = run.stats.at(i).gathers;
      EXPECT_EQ(static_cast<std::int64_t>(gathers.num_gathers), step.num_gathers) << "step " << i;
      EXPECT_EQ(static_cast<std::int64_t>(gathers.gathered_bytes), step.gathered_bytes)
          << "step " << i;
      EXPECT_EQ(static_cast<std::int64_t>(gathers.prefetch_misses), step.num_misses)
          << "step " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Inspect, Foretold, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::cli
