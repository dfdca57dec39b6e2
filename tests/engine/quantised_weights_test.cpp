// quant.weights: whole trainings with quantised gathers against a plain loop that computes with
// fake-quantised parameters; the same bits wherever they are promised; what is sent, and what stays
// exact.
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/quant/block_codec.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/contains.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kBlock = 32;  // so that shards of small models have several blocks

Config quantised_config(Config config = quiet_config()) {
  config.apply_flag("quant.weights=true");
  config.apply_flag("quant.block_numel=" + std::to_string(kBlock));
  return config;
}

// What ranks compute with: each shard encoded and decoded by itself, padding included.
at::Tensor fake_quantised(const at::Tensor& param, int num_ranks) {
  if (num_ranks == 1) {
    return param.detach().clone();
  }
  const auto codec = quant::make_cpu_block_codec({8, kBlock});
  const std::int64_t numel = param.numel();
  const std::int64_t shard = shard::Layout(numel, num_ranks, DType::kFloat32).shard_numel();
  at::Tensor padded = at::zeros({shard * num_ranks});
  padded.narrow(0, 0, numel).copy_(param.detach().reshape({-1}));
  std::vector<std::byte> wire(codec->wire_bytes(shard));
  for (int rank = 0; rank < num_ranks; ++rank) {
    float* const values = padded.data_ptr<float>() + rank * shard;
    codec->encode(values, DType::kFloat32, shard, wire.data(), nullptr).wait();
    codec->decode(wire.data(), shard, values, DType::kFloat32, nullptr).wait();
  }
  return padded.narrow(0, 0, numel).reshape(param.sizes()).clone();
}

// A step of sgd on exact parameters, by the gradients of a loss of quantised ones. All ranks have
// the same input, so that their mean is that of one, exactly for powers of two.
void descend_quantised(const std::vector<std::shared_ptr<AffineImpl>>& modules, int num_ranks,
                       const std::function<at::Tensor()>& loss) {
  std::vector<at::Tensor> exact;
  for (const auto& module : modules) {
    for (at::Tensor& param : module->parameters()) {
      const at::NoGradGuard no_grad;
      exact.push_back(param.detach().clone());
      param.copy_(fake_quantised(param, num_ranks));
    }
  }
  loss().backward();
  const at::NoGradGuard no_grad;
  std::size_t next = 0;
  for (const auto& module : modules) {
    for (at::Tensor& param : module->parameters()) {
      const at::Tensor& before = exact[next++];
      if (param.grad().defined()) {
        param.copy_(before - param.grad());
        param.mutable_grad().reset();
      } else {
        param.copy_(before);
      }
    }
  }
}

TEST(QuantisedWeights, TrainAsAPlainLoopWithFakeQuantisedParametersToTheBit) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const std::vector<std::shared_ptr<AffineImpl>> plain = {
        affine(37, 29, 1), affine(29, 37, 2, false), affine(37, 5, 3)};
    std::vector<std::vector<at::Tensor>> expected;
    const auto input_of = [](int step) { return input(6, 37, step); };
    for (int step = 0; step < 4; ++step) {
      const auto loss = [&] {
        return plain[2]
            ->forward(at::tanh(plain[1]->forward(at::tanh(plain[0]->forward(input_of(step))))))
            .pow(2)
            .mean();
      };
      descend_quantised(plain, ranks, loss);
      auto& params = expected.emplace_back();
      for (const auto& module : plain) {
        for (const at::Tensor& param : module->parameters()) {
          params.push_back(param.detach().clone());
        }
      }
    }
    with_engines(ranks, quantised_config(), [&](Engine& engine, comm::Group&) {
      auto first = engine.unit("first", affine(37, 29, 1));
      auto middle = engine.unit("middle", affine(29, 37, 2, false));
      auto last = engine.unit("last", affine(37, 5, 3));
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = input_of(step);
        train_step(engine, last(at::tanh(middle(at::tanh(first(x))))).pow(2).mean());
        const EngineStats stats = engine.take_stats();
        EXPECT_EQ(stats.weight_quant_error_param.empty(), ranks == 1);
        EXPECT_EQ(stats.weight_quant_error > 0, ranks > 1);
        EXPECT_LT(stats.weight_quant_error, 1.0 / 127);
        // full_value() is exact.
        for (int id = 0; id < engine.num_params(); ++id) {
          const at::Tensor& param =
              expected[static_cast<std::size_t>(step)][static_cast<std::size_t>(id)];
          EXPECT_TRUE(at::equal(engine.full_value(id), param))
              << "step " << step << " parameter " << id;
        }
      }
    });
  }
}

TEST(QuantisedWeights, ScopesShowExactValuesAndUnitsQuantisedOnes) {
  with_engines(2, quantised_config(), [&](Engine& engine, comm::Group& group) {
    const auto plain = affine(37, 29, 1);
    auto unit = engine.unit("unit", affine(37, 29, 1));
    const at::Tensor x = input(6, 37, 1);
    const auto expect_output = [&](const at::Tensor& weight, const at::Tensor& bias) {
      const at::NoGradGuard no_grad;
      const at::Tensor expected = at::linear(x, fake_quantised(weight, 2), fake_quantised(bias, 2));
      EXPECT_TRUE(at::equal(unit(x), expected));
      EXPECT_FALSE(at::equal(at::linear(x, weight, bias), expected));
    };
    expect_output(plain->weight, plain->bias);
    {
      auto scope = engine.gathered({engine.tensor(0), engine.tensor(1)});
      EXPECT_TRUE(at::equal(engine.tensor(0), plain->weight));
    }
    expect_output(plain->weight, plain->bias);
    {
      const at::NoGradGuard no_grad;
      auto scope = engine.gathered({engine.tensor(0)}, 1);
      EXPECT_TRUE(at::equal(engine.tensor(0), plain->weight));
      if (group.rank() == 1) {
        engine.tensor(0).mul_(1.5);
      }
    }
    expect_output((plain->weight * 1.5).detach(), plain->bias);
  });
}

TEST(QuantisedWeights, ThatAreResidentAreNotShownForExactOnes) {
  with_engines(2, quantised_config(), [&](Engine& engine, comm::Group&) {
    const auto plain = affine(37, 29, 1);
    auto unit = engine.unit("unit", affine(37, 29, 1));
    const at::NoGradGuard no_grad;
    {
      auto resident = engine.resident();
      ASSERT_TRUE(resident.is_resident());
      unit(input(6, 37, 1));
      EXPECT_SAYS("parameter 'unit.weight' is resident with the rounded values",
                  engine.gathered({engine.tensor(0)}).close());
      EXPECT_SAYS("engine.full_value(0) gives the exact ones",
                  engine.gathered({engine.tensor(0)}).close());
      EXPECT_TRUE(at::equal(engine.full_value(0), plain->weight));
    }
    auto scope = engine.gathered({engine.tensor(0)});
    EXPECT_TRUE(at::equal(engine.tensor(0), plain->weight));
  });
}

TEST(QuantisedWeights, BytesAreThoseOfTheWires) {
  for (const bool hierarchical : {false, true}) {
    Config config = quantised_config();
    config.apply_flag("comm.ranks_per_host=2");
    config.apply_flag(std::string("shard.hierarchical_gather=") +
                      (hierarchical ? "true" : "false"));
    config.apply_flag("persist.param_bytes=0");
    config.apply_flag("live.limit_bytes=0");
    config.apply_flag("live.reuse_distance_bytes=0");
    config.apply_flag("comm.pack_below_bytes=0");
    with_engines(4, config, [&](Engine& engine, comm::Group& group) {
      constexpr std::int64_t kWidth = 64;
      auto first = engine.unit("first", affine(kWidth, kWidth, 1));
      auto last = engine.unit("last", affine(kWidth, kWidth, 2));
      EngineStats stats;
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = input(4, kWidth, step * 17 + group.rank());
        train_step(engine, last(at::tanh(first(x))).pow(2).mean());
        stats = engine.take_stats();
      }
      const auto codec = quant::make_cpu_block_codec({8, kBlock});
      std::int64_t wires = 0;  // of one rank and one of the units, which are alike
      std::int64_t numel = 0;
      std::int64_t unit_bytes = 0;
      for (int id = 0; id < engine.num_params(); ++id) {
        const shard::Layout& layout = engine.param(id).layout();
        if (id < 2) {
          wires += static_cast<std::int64_t>(codec->wire_bytes(layout.shard_numel()));
          unit_bytes += static_cast<std::int64_t>(layout.full_bytes());
        }
        numel += layout.padded_numel();
      }
      const auto gathered = static_cast<std::int64_t>(stats.gathers.gathered_bytes);
      ASSERT_EQ(gathered % unit_bytes, 0);
      const std::int64_t times = gathered / unit_bytes;
      EXPECT_EQ(static_cast<std::int64_t>(stats.gathered_wire_bytes), times * wires * 3);
      // Hierarchical: to the rank of the other host alone, and inside both hosts' wires.
      // Beside them each peer gets a quarter of the gradients, in fp32.
      const std::int64_t across = times * wires * (hierarchical ? 1 : 2) + 2 * numel;
      const std::int64_t inside = times * wires * (hierarchical ? 2 : 1) + numel;
      constexpr std::int64_t kSmall = 4096;
      const auto sent_across = static_cast<std::int64_t>(stats.sent_across_bytes);
      const auto sent_inside = static_cast<std::int64_t>(stats.sent_inside_bytes);
      EXPECT_GE(sent_across, across);
      EXPECT_LE(sent_across, across + kSmall);
      EXPECT_GE(sent_inside, inside);
      EXPECT_LE(sent_inside, inside + kSmall);
    });
  }
}

RunOutcome train_quantised(int ranks, RunDevice device, DType dtype, const Options& more) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.vocabulary = 67;  // does not divide
  settings.model.sequence = 8;
  settings.model.tie_head = true;
  settings.model.freeze = 1;
  settings.model.recompute = true;
  settings.model.dtype = dtype;
  settings.batch = 12;
  settings.steps = 4;
  settings.accumulate = 1;
  settings.data = "random";
  settings.ranks = ranks;
  settings.device = device;
  if (device == RunDevice::kMock) {  // small parameters never leave it
    settings.model.width = dtype == DType::kFloat32 ? 160 : 208;
    settings.model.vocabulary = 661;
  }
  settings.calls_on_streams = device == RunDevice::kMock && ranks == 2;
  settings.options = joined({{"grad.clip_norm", "0.5"},
                             {"quant.weights", "true"},
                             {"quant.block_numel", std::to_string(kBlock)}},
                            more);
  return train(settings);
}

TEST(QuantisedWeights, HaveTheSameBitsWhateverElseIsChosen) {
  const DiskDirectory directory;
  const Options nvme = joined({{"place.parameters", "nvme"},
                               {"place.optimizer", "nvme"},
                               {"optim.sub_group_bytes", "8KiB"},
                               {"nvme.optimizer_buffers", "2"}},
                              nvme_in(directory));
  const std::vector<Placed> choices = {
      {"again", {}},
      {"no prefetch",
       {{"prefetch.bucket_bytes", "0"}, {"live.limit_bytes", "0"}, {"persist.param_bytes", "0"}}},
      {"small buckets", {{"prefetch.bucket_bytes", "2KiB"}, {"grad.bucket_bytes", "1KiB"}}},
      {"hpZ", {{"shard.secondary_group_size", "2"}, {"live.limit_bytes", "0"}}},
      {"NVMe", nvme}};
  for (const int ranks : {2, 4}) {
    const RunOutcome first = train_quantised(ranks, RunDevice::kCpu, DType::kFloat32, {});
    ASSERT_FALSE(first.stats.back().weight_quant_error_param.empty());
    for (const Placed& each : choices) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << each.name);
      const RunOutcome run = train_quantised(ranks, RunDevice::kCpu, DType::kFloat32, each.options);
      EXPECT_TRUE(same_bits(run, first)) << difference(run, first).describe();
      EXPECT_EQ(run.stats.back().weight_quant_error, first.stats.back().weight_quant_error);
    }
    // Ranks hold other shards, so the same values in other places.
    if (ranks == 4) {
      const Options flat = {{"comm.ranks_per_host", "2"}};
      const Options two_phases = joined(flat, {{"shard.hierarchical_gather", "true"}});
      const RunOutcome run = train_quantised(4, RunDevice::kCpu, DType::kFloat32, two_phases);
      EXPECT_TRUE(same_bits(run, first)) << difference(run, first).describe();
    }
  }
}

// The double's kernels are the host's: low precision is slow there.
TEST(QuantisedWeights, HaveTheSameBitsAtAllPlacesOfADiscreteDevice) {
  const DiskDirectory directory;
  const Options nvme = joined({{"place.parameters", "nvme"},
                               {"place.optimizer", "nvme"},
                               {"optim.sub_group_bytes", "8KiB"},
                               {"nvme.optimizer_buffers", "2"}},
                              nvme_in(directory));
  const Options host = {
      {"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int ranks : {2, 3}) {
      const RunOutcome first = train_quantised(ranks, RunDevice::kMock, dtype, {});
      for (const Placed& each : {Placed{"host", host}, Placed{"NVMe", nvme}}) {
        SCOPED_TRACE(::testing::Message()
                     << ranks << " ranks, " << to_string(dtype) << ", " << each.name);
        const RunOutcome run = train_quantised(ranks, RunDevice::kMock, dtype, each.options);
        EXPECT_TRUE(same_bits(run, first)) << difference(run, first).describe();
      }
    }
  }
}

TEST(QuantisedWeights, OffChangesNoBitAndOnDoes) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.sequence = 8;
  settings.batch = 4;
  settings.steps = 2;
  settings.ranks = 2;
  settings.data = "random";
  const RunOutcome plain = train(settings);
  EXPECT_EQ(plain.stats.back().weight_quant_error_param, "");
  settings.options = {{"quant.weights", "false"}, {"quant.block_numel", "64"}};
  EXPECT_TRUE(same_bits(train(settings), plain));
  settings.options = {{"quant.weights", "true"}};
  EXPECT_FALSE(same_bits(train(settings), plain));
}

}  // namespace
}  // namespace tessera::testing
