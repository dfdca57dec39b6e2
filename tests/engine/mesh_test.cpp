// Shard groups and replicas: whole trainings on every mesh against unsharded training, with the
// same bits wherever they are promised; what ranks send; copies that stay the same; saves that
// change their mesh.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "models/gpt_shapes.h"
#include "tessera/comm/mesh_bytes.h"
#include "tessera/core/error.h"
#include "tessera/planner/memory_planner.h"
#include "testing/mock_device.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/expert_training.h"
#include "tests/engine/rounding_bounds.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

struct MeshCase {
  int ranks = 4;
  int shard_size = 0;
  int ranks_per_host = 0;
  bool hierarchical = false;
  int second = 1;  // ranks of secondary shards
};

std::string text_of(const std::exception_ptr& failure) {
  try {
    if (failure) {
      std::rethrow_exception(failure);
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string name_of(const MeshCase& mesh) {
  return std::to_string(mesh.ranks) + " ranks in groups of " + std::to_string(mesh.shard_size) +
         ", " + std::to_string(mesh.ranks_per_host) + " per host" +
         (mesh.hierarchical ? ", hierarchical" : "") +
         (mesh.second > 1 ? ", secondary shards over " + std::to_string(mesh.second) : "");
}

Options options_of(const MeshCase& mesh) {
  return {{"shard.group_size", std::to_string(mesh.shard_size)},
          {"comm.ranks_per_host", std::to_string(mesh.ranks_per_host)},
          {"shard.hierarchical_gather", mesh.hierarchical ? "true" : "false"},
          {"shard.secondary_group_size", std::to_string(mesh.second)}};
}

RunSettings micro_run(int accumulate) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.vocabulary = 67;  // does not divide
  settings.model.sequence = 8;
  settings.model.tie_head = true;
  settings.model.freeze = 1;
  settings.model.recompute = true;
  settings.batch = 48;  // of 4, 6 and 8 ranks with 1 and 2 micro-batches
  settings.steps = 4;   // two are recorded, two follow the plan
  settings.accumulate = accumulate;
  settings.data = "random";
  return settings;
}

RunOutcome train_on(const MeshCase& mesh, RunSettings settings, const Options& more = {}) {
  settings.ranks = mesh.ranks;
  settings.options =
      joined({{"grad.clip_norm", "0.5"}, {"batch.accumulate", std::to_string(settings.accumulate)}},
             joined(more, options_of(mesh)));
  RunOutcome run = train(settings);
  EXPECT_EQ(run.differs_in_copies, "") << name_of(mesh);
  return run;
}

class Meshes : public ::testing::TestWithParam<int> {};

// Sums are made in another order than plain ZeRO-3's where there are several copies; which shards
// ranks hold, and in how many phases they are gathered, changes no bit.
TEST_P(Meshes, OfEveryShardSizeEqualTheReferenceWithTheSameBitsInOneAndTwoPhases) {
  const int ranks = GetParam();
  RunSettings settings = micro_run(2);
  settings.options = {{"grad.clip_norm", "0.5"}};
  settings.ranks = 0;
  const RunOutcome reference = train(settings);
  const RunOutcome plain = train_on({ranks, 0, 0, false}, settings);
  for (int size = 1; size <= ranks; ++size) {
    if (ranks % size != 0) {
      continue;
    }
    const MeshCase flat{ranks, size, 0, false};
    SCOPED_TRACE(name_of(flat));
    const RunOutcome run = train_on(flat, settings);
    const Difference off = difference(run, reference);
    EXPECT_LE(off.largest(), parity_bounds(settings.model).step) << off.describe();
    EXPECT_LE(off.noise, noise_bound(settings.steps));
    EXPECT_EQ(same_bits(run, plain), size == ranks) << difference(run, plain).describe();
    for (int per_host = 1; per_host < size; ++per_host) {
      if (size % per_host == 0) {
        const MeshCase two_phases{ranks, size, per_host, true};
        EXPECT_TRUE(same_bits(train_on(two_phases, settings), run)) << name_of(two_phases);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(World, Meshes, ::testing::Values(4, 6, 8),
                         [](const auto& info) { return "Of" + std::to_string(info.param); });

std::vector<Placed> places_on(RunDevice device, const DiskDirectory& directory) {
  const Options nvme = joined({{"place.parameters", "nvme"},
                               {"place.optimizer", "nvme"},
                               {"optim.sub_group_bytes", "8KiB"},
                               {"nvme.optimizer_buffers", "2"}},
                              nvme_in(directory));
  if (device == RunDevice::kCpu) {
    return {{"memory", {}}, {"NVMe", nvme}};
  }
  const Options host = {
      {"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}};
  return {{"device", {}}, {"host", host}, {"NVMe", nvme}};
}

// The mock device's ranks have calls on streams in turn, as NCCL's are, and calls through pinned
// memory.
TEST(MeshPlaces, ChangeNoBitWithAnyNumberOfMicroBatches) {
  for (const RunDevice device : {RunDevice::kCpu, RunDevice::kMock}) {
    for (const int accumulate : {1, 2, 3}) {
      // bf16 rounds once more on the wire; on a CPU without units for it, it is slow.
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        if (dtype == DType::kBFloat16 && (accumulate == 2 || device == RunDevice::kCpu)) {
          continue;
        }
        for (const MeshCase& mesh : {MeshCase{4, 2, 0, false}, MeshCase{4, 2, 1, true}}) {
          if (mesh.hierarchical != (accumulate == 2) && device == RunDevice::kCpu) {
            continue;
          }
          RunSettings settings = micro_run(accumulate);
          settings.batch = 4 * accumulate;
          settings.device = device;
          settings.model.dtype = dtype;
          settings.gives_shapes = accumulate == 2;
          settings.calls_on_streams = device == RunDevice::kMock && accumulate == 1;
          if (device == RunDevice::kMock) {  // small parameters never leave it
            settings.model.width = dtype == DType::kFloat32 ? 160 : 208;
            settings.model.vocabulary = 661;
          }
          std::optional<RunOutcome> first;
          const DiskDirectory directory;
          for (const Placed& placed : places_on(device, directory)) {
            SCOPED_TRACE(::testing::Message()
                         << name_of(mesh) << ", " << accumulate << " micro-batches, "
                         << to_string(dtype) << ", " << placed.name);
            RunOutcome run = train_on(mesh, settings, placed.options);
            if (first) {
              EXPECT_TRUE(same_bits(run, *first)) << difference(run, *first).describe();
            } else {
              first = std::move(run);
            }
          }
        }
      }
    }
  }
}

TEST(MeshDynamicUnits, RoutedAtRandomTrainAsTheUnshardedModel) {
  for (const MeshCase& mesh : {MeshCase{4, 2, 0, false}, MeshCase{4, 1, 0, false},
                               MeshCase{4, 4, 2, true}, MeshCase{6, 3, 0, false}}) {
    SCOPED_TRACE(name_of(mesh));
    for (const std::string kind : {"sgd", "adamw"}) {
      ExpertRun run;
      run.kind = kind;
      const std::vector<at::Tensor> plain = train_plain_experts(run, mesh.ranks);
      Config config = config_of(run);
      for (const auto& [name, value] : options_of(mesh)) {
        config.apply_flag(name + "=" + value);
      }
      with_engines(mesh.ranks, config, [&](Engine& engine, comm::Group&) {
        expect_experts_close(train_experts(engine, run).params, plain);
      });
    }
  }
}

// Sums over copies of dynamic parameters are fp32, wherever their gradients live.
TEST(MeshDynamicUnits, OnADiscreteDeviceHaveTheSameBitsAtAllPlaces) {
  for (const MeshCase& mesh : {MeshCase{4, 2, 0, false}, MeshCase{4, 1, 0, false}}) {
    std::optional<std::vector<at::Tensor>> first;
    const DiskDirectory directory;
    for (const Placed& placed : places_on(RunDevice::kMock, directory)) {
      SCOPED_TRACE(name_of(mesh) + ", " + placed.name);
      ExpertRun run;
      run.steps = 6;
      run.kind = "sgd";
      run.width = 264;  // small parameters never leave the device
      Config config = config_of(run);
      for (const auto& [name, value] : joined(options_of(mesh), placed.options)) {
        config.apply_flag(name + "=" + value);
      }
      std::vector<std::vector<at::Tensor>> params(static_cast<std::size_t>(mesh.ranks));
      comm::run_ranks(mesh.ranks, [&](comm::Group& group) {
        RuntimeOptions options{-1, 1};
        options.make_device = [](device::CpuDeviceOptions host) {
          device::MockDeviceOptions late;
          late.mode = device::LateMode::kLazy;
          late.own_memory = true;
          late.host = std::move(host);
          return device::make_mock_device(std::move(late));
        };
        Runtime runtime(config, group, options);
        Engine engine(runtime);
        params[static_cast<std::size_t>(group.rank())] = train_experts(engine, run).params;
      });
      if (!first) {
        first = params[0];
        expect_experts_close(*first, train_plain_experts(run, mesh.ranks));
      }
      for (const std::vector<at::Tensor>& of_rank : params) {
        for (std::size_t i = 0; i < first->size(); ++i) {
          EXPECT_TRUE(at::equal(of_rank[i], (*first)[i])) << "parameter " << i;
        }
      }
    }
  }
}

// --- What ranks send.

TEST(MeshBytes, AreTheClosedFormInsideHostsAndAcross) {
  for (const int accumulate : {1, 3}) {
    for (const MeshCase& mesh :
         {MeshCase{4, 2, 2, false}, MeshCase{4, 2, 1, false}, MeshCase{4, 2, 1, true},
          MeshCase{4, 4, 2, false}, MeshCase{4, 4, 2, true}, MeshCase{8, 4, 2, true},
          MeshCase{6, 2, 2, false}, MeshCase{4, 1, 2, false}, MeshCase{8, 4, 2, false, 2},
          MeshCase{8, 4, 2, true, 2}}) {
      SCOPED_TRACE(::testing::Message() << name_of(mesh) << ", " << accumulate);
      Config config = quiet_config();
      for (const auto& [name, value] : options_of(mesh)) {
        config.apply_flag(name + "=" + value);
      }
      config.apply_flag("batch.accumulate=" + std::to_string(accumulate));
      config.apply_flag("persist.param_bytes=0");
      config.apply_flag("live.limit_bytes=0");
      with_engines(mesh.ranks, config, [&](Engine& engine, comm::Group& group) {
        constexpr std::int64_t kWidth = 64;
        auto first = engine.unit("first", affine(kWidth, kWidth, 1));
        auto second = engine.unit("second", affine(kWidth, kWidth, 2));
        const auto run_step = [&](int step) {
          for (int micro = 0; micro < accumulate; ++micro) {
            const at::Tensor x = input(4, kWidth, step * 17 + group.rank() + micro);
            engine.backward(second(at::tanh(first(x))).pow(2).mean());
          }
          engine.step();
          return engine.take_stats();
        };
        for (int step = 0; step < 3; ++step) {
          run_step(step);
        }
        const EngineStats stats = run_step(3);
        comm::StepVolume volume;
        volume.secondary_bytes = static_cast<std::int64_t>(stats.gathers.secondary_bytes);
        volume.secondary_size = mesh.second;
        EXPECT_EQ(volume.secondary_bytes > 0, mesh.second > 1);
        volume.gathered_bytes =
            static_cast<std::int64_t>(stats.gathers.gathered_bytes) - volume.secondary_bytes;
        std::vector<std::int64_t> buckets(1);
        for (int id = 0; id < engine.num_params(); ++id) {
          buckets[0] += engine.param(id).layout().padded_numel();
        }
        volume.bucket_numel = buckets;
        volume.num_micro_batches = accumulate;
        const comm::MeshBytes expected = comm::step_bytes(engine.mesh(), volume);
        // Beside them: the norm, the bits of used parameters and the comparison of uses.
        constexpr std::int64_t kSmall = 4096;
        const auto inside = static_cast<std::int64_t>(stats.sent_inside_bytes);
        const auto across = static_cast<std::int64_t>(stats.sent_across_bytes);
        EXPECT_GE(inside, expected.rank().inside);
        EXPECT_LE(inside, expected.rank().inside + kSmall);
        EXPECT_GE(across, expected.rank().across);
        EXPECT_LE(across, expected.rank().across + kSmall);
        EXPECT_EQ(static_cast<std::int64_t>(stats.gathered_wire_bytes),
                  expected.gathers.sum() + expected.secondary_gathers.sum());
        EXPECT_EQ(static_cast<std::int64_t>(stats.reduced_wire_bytes),
                  expected.reduce_scatters.sum() + expected.replica_sums.sum());
      });
    }
  }
}

// --- Secondary shards.

RunSettings with_second(int ranks, int second, RunSettings settings, const Options& more) {
  settings.ranks = ranks;
  settings.options = joined({{"grad.clip_norm", "0.5"},
                             {"batch.accumulate", std::to_string(settings.accumulate)},
                             {"persist.param_bytes", "0"},
                             {"live.limit_bytes", "0"}},  // every use gathers
                            more);
  if (second > 1) {
    settings.options.emplace_back("shard.secondary_group_size", std::to_string(second));
  }
  return settings;
}

RunOutcome train_with_second(int ranks, int second, const RunSettings& settings,
                             const Options& more) {
  return train(with_second(ranks, second, settings, more));
}

std::int64_t num_secondary_in_host(const planner::MemoryPlan& plan) {
  return std::count_if(plan.params.begin(), plan.params.end(),
                       [](const Placement& each) { return each.secondary == Tier::kHost; });
}

// Of the device: the largest with which some secondary shards are in host memory, and one with
// which as many as can are.
std::vector<std::int64_t> tight_budgets(const RunSettings& settings) {
  const planner::ModelShapes shapes = models::planner_shapes(models::gpt_shape(settings.model));
  auto options = planner::MemoryPlanOptions::from(config_of(settings), settings.ranks, true);
  options.group_memory = {};  // of ranks as threads
  const std::int64_t all =
      planner::plan_memory(shapes, options, settings.accumulate).device_memory_bytes();
  std::vector<std::int64_t> budgets;
  std::int64_t most = 0;
  options.is_device_given = true;
  for (std::int64_t part = 100; part > 0; --part) {
    options.device_bytes = all * part / 100;
    try {
      const std::int64_t count =
          num_secondary_in_host(planner::plan_memory(shapes, options, settings.accumulate));
      if (count > most) {
        budgets.push_back(options.device_bytes);
        most = count;
      }
    } catch (const ConfigError&) {
      break;
    }
  }
  return budgets.size() > 2 ? std::vector{budgets.front(), budgets.back()} : budgets;
}

// The mock's memory is the host's: whole pages.
void expect_planned_shards(const RunOutcome& run) {
  for (const Tier tier : {Tier::kDevice, Tier::kPinned}) {
    const std::int64_t planned = run.placement->bytes(tier, Role::kShard);
    const auto peak = run.peaks.find({tier, Role::kShard});
    const std::int64_t taken = peak == run.peaks.end() ? 0 : peak->second;
    EXPECT_GE(taken, planned);
    EXPECT_LE(taken, planned + 4096 * static_cast<std::int64_t>(run.params.size()));
  }
}

TEST(SecondaryShardTraining, ChangeNoBitOnAnyNumberOfRanksAtAnyPlace) {
  struct Second {
    int ranks;
    int size;
  };
  for (const Second each : {Second{4, 2}, Second{6, 3}, Second{8, 4}}) {
    for (const RunDevice device : {RunDevice::kCpu, RunDevice::kMock}) {
      RunSettings settings = micro_run(2);
      settings.device = device;
      if (device == RunDevice::kMock) {
        if (each.ranks > 4) {
          continue;
        }
        settings.batch = 8;
        settings.model.width = 160;
        settings.model.vocabulary = 661;
        settings.steps = 3;
      }
      const DiskDirectory directory;
      for (const Placed& placed : places_on(device, directory)) {
        SCOPED_TRACE(::testing::Message() << each.ranks << " ranks, secondary shards over "
                                          << each.size << ", " << placed.name);
        const RunOutcome plain = train_with_second(each.ranks, 1, settings, placed.options);
        const RunOutcome run = train_with_second(each.ranks, each.size, settings, placed.options);
        EXPECT_TRUE(same_bits(run, plain)) << difference(run, plain).describe();
        ASSERT_EQ(run.stats.size(), plain.stats.size());
        EXPECT_EQ(run.stats.back().gathers.gathered_bytes,
                  plain.stats.back().gathers.gathered_bytes);
        EXPECT_GT(run.stats.back().gathers.secondary_bytes, 0U);
        if (run.placement && device == RunDevice::kMock) {
          expect_planned_shards(run);
        }
        if (placed.name == "NVMe") {
          // Four gathers of a step read a shard once; the first of them may get it from its update.
          const std::uint64_t read = run.stats.back().io.parameters.read_bytes;
          EXPECT_LE(read, static_cast<std::uint64_t>(run.placement->step.parameters_read));
          EXPECT_GE(plain.placement->step.parameters_read, 4 * run.placement->step.parameters_read)
              << "the tied one more often";
          EXPECT_GT(plain.stats.back().io.parameters.read_bytes, 2 * read);
        }
      }
    }
  }
}

// Two copies, each over two hosts of two ranks: what hpZ keeps is of one copy and one host.
TEST(SecondaryShardTraining, ChangeNoBitInsideAShardGroup) {
  for (const bool hierarchical : {false, true}) {
    RunSettings settings = micro_run(2);
    settings.batch = 16;
    const DiskDirectory directory;
    for (const Placed& placed : places_on(RunDevice::kCpu, directory)) {
      SCOPED_TRACE(::testing::Message() << placed.name << (hierarchical ? ", hierarchical" : ""));
      const Options more = joined({{"persist.param_bytes", "0"},
                                   {"live.limit_bytes", "0"},
                                   {"mics.check_replicas", "true"}},
                                  placed.options);
      const RunOutcome plain = train_on({8, 4, 2, hierarchical}, settings, more);
      const RunOutcome run = train_on({8, 4, 2, hierarchical, 2}, settings, more);
      EXPECT_TRUE(same_bits(run, plain)) << difference(run, plain).describe();
      EXPECT_EQ(plain.stats.back().gathers.secondary_bytes, 0U);
      EXPECT_GT(run.stats.back().gathers.secondary_bytes, 0U);
      EXPECT_LT(run.stats.back().sent_across_bytes, plain.stats.back().sent_across_bytes);
    }
  }
}

TEST(SecondaryShardTraining, ChangeNoBitInHostMemoryWhereTheDeviceHasNoRoom) {
  RunSettings settings = micro_run(2);
  settings.device = RunDevice::kMock;
  settings.batch = 8;
  settings.model.width = 160;
  settings.model.vocabulary = 661;
  settings.steps = 3;
  const DiskDirectory directory;
  std::vector<Placed> choices = places_on(RunDevice::kMock, directory);
  // Those of wires live there as wires.
  for (const Placed& wires :
       {Placed{"qwZ", {{"quant.weights", "true"}}}, {"int4", {{"quant.frozen_bits", "4"}}}}) {
    const Options host = choices[1].options;
    choices.push_back({wires.name + " beside a device", joined(host, wires.options)});
  }
  for (const Placed& placed : choices) {
    if (placed.name == "device") {
      continue;
    }
    SCOPED_TRACE(placed.name);
    const RunOutcome plain = train_with_second(4, 1, settings, placed.options);
    const RunOutcome roomy = train_with_second(4, 2, settings, placed.options);
    EXPECT_EQ(num_secondary_in_host(*roomy.placement), 0);
    const std::vector<std::int64_t> budgets =
        tight_budgets(with_second(4, 2, settings, placed.options));
    ASSERT_FALSE(budgets.empty());
    bool had_some_of_each = false;
    for (const std::int64_t budget : budgets) {
      const RunOutcome run = train_with_second(
          4, 2, settings, joined(placed.options, {{"memory.device", std::to_string(budget)}}));
      const planner::MemoryPlan& plan = *run.placement;
      EXPECT_GT(num_secondary_in_host(plan), 0);
      had_some_of_each = had_some_of_each || plan.params.front().secondary == Tier::kDevice;
      EXPECT_TRUE(same_bits(run, plain)) << difference(run, plain).describe();
      const EngineStats& stats = run.stats.back();
      EXPECT_EQ(stats.gathers.secondary_bytes, roomy.stats.back().gathers.secondary_bytes);
      EXPECT_GT(stats.gathers.brought_bytes, roomy.stats.back().gathers.brought_bytes);
      EXPECT_GT(stats.gathers.kept_bytes, 0U);
      EXPECT_LE(stats.h2d_bytes, static_cast<std::uint64_t>(plan.link.h2d));
      EXPECT_LE(stats.d2h_bytes, static_cast<std::uint64_t>(plan.link.d2h));
      EXPECT_LE(plan.device_memory_bytes(), budget);
      expect_planned_shards(run);
    }
    EXPECT_TRUE(had_some_of_each);
  }
}

// fp16 with a scale that overflows: the first steps are skipped, and secondary shards stay what
// they are. Loads and edits make them stale.
TEST(SecondaryShardTraining, OutliveSkippedStepsAndNoChangeOfValues) {
  RunSettings settings = micro_run(1);
  settings.model.dtype = DType::kFloat16;
  settings.batch = 8;
  settings.steps = 10;
  const Options scale = {{"loss_scale.initial", "4194304"}, {"loss_scale.hysteresis", "1"}};
  RunOutcome plain = train_with_second(4, 1, settings, scale);
  EXPECT_TRUE(plain.steps[0].skipped) << "nothing is tested";
  EXPECT_FALSE(plain.steps.back().skipped);
  RunOutcome run = train_with_second(4, 2, settings, scale);
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    EXPECT_EQ(run.steps[i].skipped, plain.steps[i].skipped) << "step " << i;
    EXPECT_TRUE(run.steps[i].skipped || run.steps[i].grad_norm == plain.steps[i].grad_norm);
  }
  run.steps.clear();  // norms of skipped ones are no numbers
  plain.steps.clear();
  EXPECT_TRUE(same_bits(run, plain));

  const MemoryDirectory folder;
  settings = micro_run(1);
  settings.batch = 8;
  settings.saves.root = (folder.path() / "saves").string();
  settings.saves.behind = {2};
  const RunOutcome whole = train_with_second(4, 2, settings, {});
  settings.saves = {};
  settings.saves.load = (folder.path() / "saves").string();
  RunOutcome rest = train_with_second(4, 2, settings, {});
  rest.steps.insert(rest.steps.begin(), whole.steps.begin(), whole.steps.begin() + 2);
  EXPECT_TRUE(same_bits(rest, whole));
}

TEST(SecondaryShardTraining, AreNotThoseOfBeforeAnEdit) {
  Config config = quiet_config();
  config.apply_flag("shard.secondary_group_size=2");
  config.apply_flag("persist.param_bytes=0");
  config.apply_flag("live.limit_bytes=0");
  with_engines(4, config, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const at::Tensor x = input(4, 5, 1);
    {
      const at::NoGradGuard no_grad;
      unit(x);
      unit(x);
    }
    change(engine, {engine.tensor(0), engine.tensor(1)}, 1, [&] {
      engine.tensor(0).fill_(0.25);
      engine.tensor(1).fill_(0.5);
    });
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(unit(x), x.sum(1, true).mul(0.25).add(0.5).expand({4, 6})));
    }
    static_cast<void>(group);
  });
}

// Of the gathers of a step only the first of each parameter crosses hosts.
TEST(SecondaryShardTraining, AreWhatBackwardGathersInsideAHost) {
  for (const int accumulate : {1, 3}) {
    for (const int second : {1, 2}) {
      Config config = quiet_config();
      config.apply_flag("comm.ranks_per_host=2");
      config.apply_flag("shard.secondary_group_size=" + std::to_string(second));
      config.apply_flag("batch.accumulate=" + std::to_string(accumulate));
      config.apply_flag("persist.param_bytes=0");
      config.apply_flag("live.limit_bytes=0");
      config.apply_flag("live.reuse_distance_bytes=0");
      with_engines(4, config, [&](Engine& engine, comm::Group& group) {
        constexpr std::int64_t kWidth = 64;
        auto first = engine.unit("first", affine(kWidth, kWidth, 1));
        auto last = engine.unit("last", affine(kWidth, kWidth, 2));
        EngineStats stats;
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < accumulate; ++micro) {
            const at::Tensor x = input(4, kWidth, step * 17 + group.rank() + micro);
            engine.backward(last(at::tanh(first(x))).pow(2).mean());
          }
          engine.step();
          stats = engine.take_stats();
        }
        std::int64_t model_bytes = 0;
        std::int64_t numel = 0;
        for (int id = 0; id < engine.num_params(); ++id) {
          model_bytes += static_cast<std::int64_t>(engine.param(id).layout().full_bytes());
          numel += engine.param(id).layout().padded_numel();
        }
        const auto gathered = static_cast<std::int64_t>(stats.gathers.gathered_bytes);
        ASSERT_GT(gathered, model_bytes);
        const std::int64_t from_hosts = second == 1 ? gathered : model_bytes;
        // Two of three peers are on the other host.
        const std::int64_t reduced = accumulate * numel * 4 / 4 * 2;
        constexpr std::int64_t kSmall = 4096;
        const auto across = static_cast<std::int64_t>(stats.sent_across_bytes);
        EXPECT_GE(across, from_hosts / 4 * 2 + reduced);
        EXPECT_LE(across, from_hosts / 4 * 2 + reduced + kSmall);
      });
    }
  }
}

TEST(SecondaryShardTraining, ThatLeaveAHostAreRefusedWithWhatIsPossible) {
  Config config = quiet_config();
  config.apply_flag("comm.ranks_per_host=2");
  config.apply_flag("shard.secondary_group_size=4");
  for (const std::exception_ptr& failure : failures_of(4, config, [](Engine&, comm::Group&) {})) {
    EXPECT_HAS(text_of(failure), "zero_hpz_partition_size");
    EXPECT_HAS(text_of(failure), "possible are 2");
  }
}

// --- Copies.

TEST(MeshCopies, StayTheSameOver50StepsAndADifferenceOfOneBitIsNamedOnEveryRank) {
  RunSettings settings = micro_run(3);
  settings.batch = 12;
  settings.steps = 50;
  train_on({4, 2, 0, false}, settings, {{"mics.check_replicas", "true"}});

  Config config = quiet_config();
  config.apply_flag("shard.group_size=2");
  config.apply_flag("mics.check_replicas=true");
  for (const std::exception_ptr& failure :
       failures_of(4, config, [](Engine& engine, comm::Group& group) {
         auto left = engine.unit("left", affine(5, 6, 1));
         auto right = engine.unit("right", affine(6, 6, 2));
         for (int step = 0; step < 3; ++step) {
           if (step == 2 && group.rank() == 3) {
             engine.param(2).shard()[5] ^= std::byte{1};
           }
           train_step(engine, right(left(input(4, 5, step))).pow(2).mean());
         }
       })) {
    const std::string text = text_of(failure);
    EXPECT_HAS(text, "parameter 'right.weight': the copies of the model differ: rank 3");
    EXPECT_HAS(text, "that rank 1 holds");
  }
}

TEST(MeshCopies, SeeWhatOneRankChangesInAGatheredScope) {
  for (const int size : {1, 2}) {
    Config config = quiet_config();
    config.apply_flag("shard.group_size=" + std::to_string(size));
    config.apply_flag("mics.check_replicas=true");
    with_engines(4, config, [](Engine& engine, comm::Group& group) {
      auto unit = engine.unit("unit", affine(5, 6, 1));
      train_step(engine, unit(input(4, 5, group.rank())).pow(2).mean());
      {
        GatheredScope scope = engine.gathered({engine.tensor(0)}, 2);
        if (group.rank() == 2) {
          const at::NoGradGuard no_grad;
          engine.tensor(0).fill_(0.25);
        }
        scope.close();
      }
      EXPECT_TRUE(at::equal(engine.full_value(0), at::full_like(engine.full_value(0), 0.25)));
      train_step(engine, unit(input(4, 5, group.rank() + 7)).pow(2).mean());
    });
  }
}

// --- Meshes that cannot be, and saves that change theirs.

TEST(MeshErrors, ListWhatIsPossible) {
  Config config = quiet_config();
  config.apply_flag("shard.group_size=3");
  for (const std::exception_ptr& failure : failures_of(4, config, [](Engine&, comm::Group&) {})) {
    const std::string text = text_of(failure);
    EXPECT_HAS(text, "3");
    EXPECT_HAS(text, "1, 2");
  }
}

TEST(MeshErrors, NameBothMeshesWhereMemoryWasPlannedForAnother) {
  Config config = quiet_config();
  config.apply_flag("memory.host=1GiB");
  planner::ModelShapes shapes;
  shapes.params = {{"unit.weight", 30}, {"unit.bias", 6}};
  shapes.units = {{0, 1}};
  std::optional<MemoryPlanning> planning;
  comm::run_ranks(1, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    planning = plan_memory(runtime, group, shapes);
  });
  comm::run_ranks(2, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    EngineOptions options;
    options.shapes = shapes;
    options.planning = planning;
    const std::string text = message_of([&] { Engine engine(runtime, options); });
    EXPECT_HAS(text, "mesh: 1 rank");
    EXPECT_HAS(text, "mesh: 2 ranks");
  });
}

TEST(MeshCheckpoint, WhatOneMeshSavesAnyOtherLoads) {
  const MeshCase meshes[] = {{1, 0, 0, false}, {3, 0, 0, false}, {4, 2, 0, false},
                             {4, 1, 0, false}, {4, 4, 2, true},  {6, 2, 0, false}};
  for (const MeshCase& from : meshes) {
    const MemoryDirectory folder;
    RunSettings settings = micro_run(1);
    settings.batch = 12;
    settings.steps = 2;
    settings.model.dtype = DType::kBFloat16;
    settings.saves.root = (folder.path() / "saves").string();
    settings.saves.behind = {2};
    const RunOutcome saved = train_on(from, settings);
    for (const MeshCase& to : meshes) {
      SCOPED_TRACE(name_of(from) + " to " + name_of(to));
      RunSettings loading = settings;
      loading.saves = {};
      loading.saves.load = (folder.path() / "saves").string();
      RunOutcome loaded = train_on(to, loading);  // no step is left
      EXPECT_EQ(loaded.loaded->step, 2);
      EXPECT_EQ(loaded.loaded->num_ranks, from.ranks);
      loaded.steps = saved.steps;
      EXPECT_TRUE(same_bits(loaded, saved)) << difference(loaded, saved).describe();
    }
  }
}

// The files of a save hold every element once, however many copies there are.
TEST(MeshCheckpoint, IsWrittenByOneCopyOnlyAndBesideTrainingToo) {
  for (const bool beside_training : {false, true}) {
    std::map<int, std::uintmax_t> bytes;
    for (const int ranks : {2, 4}) {
      const MemoryDirectory folder;
      RunSettings settings = micro_run(1);
      settings.batch = 12;
      settings.saves.root = (folder.path() / "saves").string();
      settings.saves.behind = {2};
      settings.saves.beside_training = beside_training;
      const RunOutcome run = train_on({ranks, 2, 0, false}, settings);
      ASSERT_EQ(run.saved.size(), 1U);
      EXPECT_EQ(run.saved[0].failure, "");
      for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
        bytes[ranks] += entry.path().extension() == ".safetensors" ? entry.file_size() : 0;
      }
    }
    // Generators of two more ranks, and headers.
    EXPECT_LE(bytes[4], bytes[2] + 2 * 16384);
  }
}

}  // namespace
}  // namespace tessera::testing
