// Reductions that are quantised (qgZ), in whole trainings: the same bits wherever gradients and
// shards live and however they travel, what ranks send, what is skipped, and how far it is from
// exact training.
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/mesh_bytes.h"
#include "tessera/grad/bucket.h"
#include "tessera/quant/block_codec.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/expert_training.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

struct QuantMesh {
  int ranks = 4;
  int shard_size = 0;
  int ranks_per_host = 0;
};

std::string name_of(const QuantMesh& mesh) {
  return std::to_string(mesh.ranks) + " ranks in groups of " + std::to_string(mesh.shard_size) +
         ", " + std::to_string(mesh.ranks_per_host) + " per host";
}

Options options_of(const QuantMesh& mesh, int bits) {
  Options options = {{"shard.group_size", std::to_string(mesh.shard_size)},
                     {"comm.ranks_per_host", std::to_string(mesh.ranks_per_host)}};
  if (bits > 0) {
    options.emplace_back("quant.gradients", "true");
    options.emplace_back("quant.gradient_bits", std::to_string(bits));
  }
  return options;
}

RunSettings small_run(int accumulate) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.vocabulary = 67;  // does not divide
  settings.model.sequence = 8;
  settings.model.tie_head = true;
  settings.model.freeze = 1;
  settings.model.recompute = true;
  settings.batch = 16;
  settings.steps = 4;
  settings.accumulate = accumulate;
  settings.data = "random";
  return settings;
}

RunOutcome train_on(const QuantMesh& mesh, int bits, RunSettings settings,
                    const Options& more = {}) {
  settings.ranks = mesh.ranks;
  settings.options =
      joined({{"grad.clip_norm", "0.5"}, {"batch.accumulate", std::to_string(settings.accumulate)}},
             joined(more, options_of(mesh, bits)));
  RunOutcome run = train(settings);
  EXPECT_EQ(run.differs_in_copies, "") << name_of(mesh);
  return run;
}

std::vector<Placed> places_on(RunDevice device, const DiskDirectory& directory) {
  const Options nvme = joined({{"place.parameters", "nvme"},
                               {"place.optimizer", "nvme"},
                               {"optim.sub_group_bytes", "8KiB"},
                               {"nvme.optimizer_buffers", "2"}},
                              nvme_in(directory));
  if (device == RunDevice::kCpu) {
    return {{"memory", {}}, {"NVMe", nvme}};
  }
  return {{"device", {}},
          {"host",
           {{"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
          {"NVMe", nvme}};
}

TEST(QuantisedGradients, HaveTheSameBitsAtAllPlacesAndInEveryRun) {
  for (const RunDevice device : {RunDevice::kCpu, RunDevice::kMock}) {
    for (const QuantMesh& mesh :
         {QuantMesh{4, 0, 2}, QuantMesh{4, 2, 2}, QuantMesh{8, 4, 2}, QuantMesh{3, 0, 0}}) {
      const int accumulate = mesh.shard_size == 0 ? 2 : 1;
      RunSettings settings = small_run(accumulate);
      settings.batch = std::int64_t{2} * mesh.ranks * accumulate;
      settings.device = device;
      settings.gives_shapes = mesh.shard_size > 0;
      settings.calls_on_streams = device == RunDevice::kMock && mesh.shard_size == 2;
      if (device == RunDevice::kMock) {
        if (mesh.ranks != 4) {
          continue;
        }
        settings.model.width = 160;  // small parameters never leave the device
        settings.model.vocabulary = 661;
        settings.steps = 3;
      }
      const RunOutcome exact = train_on(mesh, 0, settings);
      std::optional<RunOutcome> first;
      const DiskDirectory directory;
      for (const Placed& placed : places_on(device, directory)) {
        SCOPED_TRACE(name_of(mesh) + ", " + placed.name);
        RunOutcome run = train_on(mesh, 8, settings, placed.options);
        EXPECT_FALSE(same_bits(run, exact)) << "nothing was quantised";
        const double error = run.stats.back().grad_quant_error;
        EXPECT_GT(error, 0);
        EXPECT_LT(error, 0.02) << "half a code of 127 is 0.004 of a block's largest";
        EXPECT_NE(run.stats.back().worst_quantised_gradient, "");
        if (first) {
          EXPECT_TRUE(same_bits(run, *first)) << difference(run, *first).describe();
        } else {
          first = std::move(run);
        }
      }
      EXPECT_TRUE(same_bits(train_on(mesh, 8, settings), *first)) << "another run";
      EXPECT_EQ(exact.stats.back().grad_quant_error, 0);
      EXPECT_EQ(exact.stats.back().worst_quantised_gradient, "");
    }
  }
}

// Nothing but the ranks and hosts decides a bit.
TEST(QuantisedGradients, HaveTheSameBitsWhateverElseIsSwitched) {
  const QuantMesh mesh{4, 0, 2};
  const RunSettings settings = small_run(2);
  const RunOutcome plain = train_on(mesh, 4, settings);
  for (const Options& more :
       {Options{{"grad.bucket_bytes", "3KB"}}, Options{{"grad.bucket_bytes", "1MiB"}},
        Options{{"shard.hierarchical_gather", "true"}},
        Options{{"shard.secondary_group_size", "2"}, {"persist.param_bytes", "0"}},
        Options{{"prefetch.bucket_bytes", "0"}}, Options{{"live.limit_bytes", "0"}}}) {
    SCOPED_TRACE(more.front().first + " = " + more.front().second);
    const RunOutcome run = train_on(mesh, 4, settings, more);
    EXPECT_TRUE(same_bits(run, plain)) << difference(run, plain).describe();
  }
  RunSettings kept = settings;
  kept.model.recompute = false;
  EXPECT_TRUE(same_bits(train_on(mesh, 4, kept), plain));
  EXPECT_FALSE(same_bits(train_on({4, 0, 4}, 4, settings), plain)) << "one hop";
}

TEST(QuantisedGradients, OfAGroupOfOneAreExact) {
  const RunSettings settings = small_run(1);
  const QuantMesh mesh{4, 1, 2};
  const RunOutcome run = train_on(mesh, 4, settings);
  EXPECT_TRUE(same_bits(run, train_on(mesh, 0, settings)));
  EXPECT_EQ(run.stats.back().grad_quant_error, 0);
}

// fp16 with a scale that overflows: what is not finite is seen behind every hop.
TEST(QuantisedGradients, ThatOverflowSkipTheSameSteps) {
  RunSettings settings = small_run(1);
  settings.model.dtype = DType::kFloat16;
  settings.batch = 8;
  settings.steps = 10;
  const Options scale = {{"loss_scale.initial", "4194304"}, {"loss_scale.hysteresis", "1"}};
  const RunOutcome exact = train_on({4, 0, 2}, 0, settings, scale);
  const RunOutcome run = train_on({4, 0, 2}, 8, settings, scale);
  EXPECT_TRUE(exact.steps.front().skipped) << "nothing is tested";
  EXPECT_FALSE(exact.steps.back().skipped);
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    EXPECT_EQ(run.steps[i].skipped, exact.steps[i].skipped) << "step " << i;
    EXPECT_TRUE(run.steps[i].skipped || std::isfinite(run.steps[i].grad_norm));
  }
}

TEST(QuantisedGradients, OfDynamicUnitsRepeatToTheBit) {
  for (const QuantMesh& mesh : {QuantMesh{4, 0, 2}, QuantMesh{4, 2, 2}}) {
    SCOPED_TRACE(name_of(mesh));
    ExpertRun run;
    run.steps = 6;
    std::vector<std::vector<at::Tensor>> found;
    for (const int bits : {8, 8, 0}) {
      Config config = config_of(run);
      for (const auto& [name, value] : options_of(mesh, bits)) {
        config.apply_flag(name + "=" + value);
      }
      std::vector<std::vector<at::Tensor>> params(static_cast<std::size_t>(mesh.ranks));
      with_engines(mesh.ranks, config, [&](Engine& engine, comm::Group& group) {
        params[static_cast<std::size_t>(group.rank())] = train_experts(engine, run).params;
      });
      for (const std::vector<at::Tensor>& of_rank : params) {
        for (std::size_t i = 0; i < of_rank.size(); ++i) {
          EXPECT_TRUE(at::equal(of_rank[i], params[0][i])) << "parameter " << i;
        }
      }
      found.push_back(params[0]);
    }
    bool any_differs = false;
    for (std::size_t i = 0; i < found[0].size(); ++i) {
      EXPECT_TRUE(at::equal(found[0][i], found[1][i])) << "parameter " << i;
      any_differs = any_differs || !at::equal(found[0][i], found[2][i]);
    }
    EXPECT_TRUE(any_differs) << "nothing was quantised";
  }
}

TEST(QuantisedGradients, SendTheClosedFormInsideHostsAndAcross) {
  for (const int bits : {4, 8}) {
    for (const QuantMesh& mesh : {QuantMesh{4, 0, 2}, QuantMesh{4, 0, 1}, QuantMesh{4, 2, 2},
                                  QuantMesh{8, 4, 2}, QuantMesh{6, 0, 3}}) {
      SCOPED_TRACE(name_of(mesh));
      constexpr int kAccumulate = 2;
      Config config = quiet_config();
      for (const auto& [name, value] : options_of(mesh, bits)) {
        config.apply_flag(name + "=" + value);
      }
      config.apply_flag("batch.accumulate=" + std::to_string(kAccumulate));
      config.apply_flag("persist.param_bytes=0");
      config.apply_flag("live.limit_bytes=0");
      with_engines(mesh.ranks, config, [&](Engine& engine, comm::Group& group) {
        constexpr std::int64_t kWidth = 64;
        auto first = engine.unit("first", affine(kWidth, kWidth, 1));
        auto second = engine.unit("second", affine(kWidth, kWidth, 2));
        EngineStats stats;
        for (int step = 0; step < 3; ++step) {
          for (int micro = 0; micro < kAccumulate; ++micro) {
            const at::Tensor x = input(4, kWidth, step * 17 + group.rank() + micro);
            engine.backward(second(at::tanh(first(x))).pow(2).mean());
          }
          engine.step();
          stats = engine.take_stats();
        }
        comm::StepVolume volume;
        volume.gathered_bytes = static_cast<std::int64_t>(stats.gathers.gathered_bytes);
        std::vector<grad::BucketParam> params;
        for (int id = 0; id < engine.num_params(); ++id) {
          params.push_back({id, engine.param(id).layout().shard_numel()});
        }
        const int size = engine.mesh().shard_size();
        std::vector<std::int64_t> buckets;
        for (const grad::Bucket& bucket :
             grad::plan_buckets(params, size, std::int64_t{1} << 20, 4, 128).buckets) {
          buckets.push_back(bucket.shard_numel * size);
        }
        volume.bucket_numel = buckets;
        volume.num_micro_batches = kAccumulate;
        volume.hop_inside = volume.hop_across = [bits](std::int64_t numel) {
          return static_cast<std::int64_t>(quant::wire_bytes({bits, 128}, numel));
        };
        const comm::MeshBytes expected = comm::step_bytes(engine.mesh(), volume);
        // Beside them: the norm, the bits of used parameters and the comparison of uses.
        constexpr std::int64_t kSmall = 4096;
        const auto inside = static_cast<std::int64_t>(stats.sent_inside_bytes);
        const auto across = static_cast<std::int64_t>(stats.sent_across_bytes);
        EXPECT_GE(inside, expected.rank().inside);
        EXPECT_LE(inside, expected.rank().inside + kSmall);
        EXPECT_GE(across, expected.rank().across);
        EXPECT_LE(across, expected.rank().across + kSmall);
        EXPECT_EQ(static_cast<std::int64_t>(stats.reduced_wire_bytes),
                  expected.reduce_scatters.sum() + expected.replica_sums.sum());
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
