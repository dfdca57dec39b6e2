// Adapters beside a base: they start as nothing, train alone over a frozen base, sharded as
// unsharded, and go into files merged or alone.
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "models/gpt_checkpoint.h"
#include "models/gpt_export.h"
#include "models/gpt_names.h"
#include "models/gpt_shapes.h"
#include "models/gpt_weights.h"
#include "tests/engine/rounding_bounds.h"
#include "tests/engine/training_run.h"
#include "tests/models/checkpoint_files.h"
#include "tests/models/models_support.h"
#include "tests/models/transformers_check.h"
#include "tests/models/weight_files.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::models {
namespace {

constexpr std::uint64_t kBaseSeed = 17;
constexpr std::int64_t kRank = 3;

GptOptions with_adapters(GptOptions options = gpt_preset("micro"), bool freeze_base = true) {
  options.adapter_rank = kRank;
  options.adapter_alpha = 5;  // no power of two beside the rank
  options.freeze_base = freeze_base;
  return options;
}

GptOptions without_adapters(GptOptions options) {
  options.adapter_rank = 0;
  options.freeze_base = false;
  return options;
}

Batch tokens_of(const GptOptions& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor tokens = at::randint(0, options.vocabulary, {3, options.sequence + 1}, generator,
                                        at::TensorOptions().dtype(at::kLong));
  return {tokens.narrow(1, 0, options.sequence).contiguous(),
          tokens.narrow(1, 1, options.sequence).contiguous()};
}

std::map<std::string, at::Tensor> by_name(const Gpt& gpt) {
  std::map<std::string, at::Tensor> tensors;
  for (const NamedParam& param : gpt.params()) {
    tensors[param.name] = param.tensor;
  }
  return tensors;
}

TEST(GptAdapters, ChangeNoBitBeforeTheyAreTrained) {
  const std::function<void(GptOptions&)> variants[] = {
      [](GptOptions&) {},
      [](GptOptions& options) { options.dtype = DType::kBFloat16; },
      [](GptOptions& options) {
        options.recompute = true;
        options.tie_head = true;
        options.gelu_tanh = true;
      },
      [](GptOptions& options) { options.loss_chunk = 7; },
  };
  for (const auto& change : variants) {
    GptOptions options = with_adapters();
    change(options);
    Gpt gpt(options, at::kCPU, kBaseSeed);
    Gpt base(without_adapters(options), at::kCPU, kBaseSeed);
    const Batch batch = tokens_of(options);
    EXPECT_TRUE(at::equal(gpt.loss(batch.ids, batch.targets), base.loss(batch.ids, batch.targets)));
    EXPECT_TRUE(at::equal(gpt.next_logits(batch.ids), base.next_logits(batch.ids)));
    const auto of_base = by_name(base);
    for (const auto& [name, tensor] : by_name(gpt)) {
      if (!is_adapter(name)) {
        EXPECT_TRUE(at::equal(tensor, of_base.at(name))) << name;
      } else if (name.ends_with(kAdapterB)) {
        EXPECT_EQ(tensor.count_nonzero().item<std::int64_t>(), 0) << name;
      } else {
        // Uniform within the bound: of so many values, one is in the outer fifth.
        const double bound = 1 / std::sqrt(static_cast<double>(tensor.size(1)));
        const double largest = tensor.to(at::kDouble).abs().max().item<double>();
        EXPECT_LE(largest, bound * (options.dtype == DType::kFloat32 ? 1 : 1 + 0x1p-8)) << name;
        EXPECT_GT(largest, 0.8 * bound) << name;
      }
    }
  }
}

TEST(GptAdapters, AloneGetGradientsOverAFrozenBaseAndTheSameOverATrainedOne) {
  for (const bool recompute : {false, true}) {
    GptOptions options = with_adapters();
    options.recompute = recompute;
    Gpt frozen(options, at::kCPU, kBaseSeed);
    options.freeze_base = false;
    Gpt trained(options, at::kCPU, kBaseSeed);
    scatter(frozen, 0.1);
    scatter(trained, 0.1);
    const Batch batch = tokens_of(options);
    frozen.loss(batch.ids, batch.targets).backward();
    trained.loss(batch.ids, batch.targets).backward();
    const auto expected = by_name(trained);
    for (const auto& [name, tensor] : by_name(frozen)) {
      EXPECT_EQ(tensor.requires_grad(), is_adapter(name)) << name;
      ASSERT_EQ(tensor.grad().defined(), is_adapter(name)) << name;
      ASSERT_TRUE(expected.at(name).grad().defined()) << name;
      if (is_adapter(name)) {
        EXPECT_TRUE(at::equal(tensor.grad(), expected.at(name).grad())) << name;
        EXPECT_GT(tensor.grad().count_nonzero().item<std::int64_t>(), 0) << name;
      }
    }
  }
}

TEST(GptAdapters, OfFrozenBlocksAreFrozen) {
  GptOptions options = with_adapters();
  options.freeze = 1;
  Gpt gpt(options, at::kCPU, kBaseSeed);
  const Batch batch = tokens_of(options);
  gpt.loss(batch.ids, batch.targets).backward();
  for (const auto& [name, tensor] : by_name(gpt)) {
    EXPECT_EQ(tensor.grad().defined(), is_adapter(name) && name.starts_with("blocks.1.")) << name;
  }
}

TEST(GptAdapters, CostWhatTheirProductsCost) {
  GptOptions options = gpt_preset("micro");
  const double base = 12.0 * 32 * 32;
  const double head = 64.0 * 32;
  const double attention = 4.0 * 32 * 16;
  const double adapters = 16.0 * kRank * 32;
  EXPECT_EQ(gpt_flops_per_token(options), 6 * (2 * base + head) + 6 * attention);
  options = with_adapters(options, /*freeze_base=*/false);
  EXPECT_EQ(gpt_flops_per_token(options), 6 * (2 * (base + adapters) + head) + 6 * attention);
  options.freeze_base = true;
  EXPECT_EQ(gpt_flops_per_token(options), 2 * (4 * base + 6 * adapters) + 4 * head + 6 * attention);
  options.freeze = 1;
  EXPECT_EQ(gpt_flops_per_token(options),
            4 * base + 6 * adapters + 2 * (base + adapters) + 4 * head + 4 * attention);
}

TEST(GptAdapters, ThatTrainNothingOrAreNoneAreRefused) {
  const auto message = [](const std::function<void(GptOptions&)>& change) {
    GptOptions options = with_adapters();
    change(options);
    return message_of([&] { options.check(); });
  };
  EXPECT_EQ(message([](GptOptions&) {}), "no ConfigError");
  EXPECT_EQ(message([](GptOptions& o) { o.adapter_rank = 33; }),
            "--adapters 33 is not from 0 (none) to 32, the width: more is no low rank");
  EXPECT_EQ(message([](GptOptions& o) { o.adapter_alpha = 0; }),
            "--adapter-alpha 0 is not a number above 0");
  EXPECT_EQ(message([](GptOptions& o) { o.adapter_alpha = INFINITY; }),
            "--adapter-alpha inf is not a number above 0");
  EXPECT_EQ(message([](GptOptions& o) { o.adapter_rank = 0; }),
            "--freeze-base without --adapters: nothing would be trained; give --adapters R, or "
            "leave --freeze-base out");
  EXPECT_EQ(message([](GptOptions& o) { o.freeze = 2; }),
            "--freeze 2 with a frozen base: nothing would be trained, adapters of frozen blocks "
            "are frozen, too; give a number below 2");
}

class AdapterTraining : public ::testing::TestWithParam<const char*> {};

TEST_P(AdapterTraining, ShardedIsThatOfOneProcess) {
  const std::string variant = GetParam();
  testing::RunSettings settings;
  settings.model = with_adapters(gpt_preset("tiny"));
  settings.model.sequence = 16;
  settings.steps = 8;
  settings.options = {{"optim.lr", "0.01"}};
  settings.gives_shapes = true;
  if (variant == "Everything") {
    settings.model.recompute = true;
    settings.model.tie_head = true;
    settings.model.loss_chunk = 50;
    settings.batch = 24;
    settings.accumulate = 2;
  } else if (variant == "SomeBlocks") {
    settings.model.layers = 4;
    settings.model.freeze = 2;
  } else if (variant == "TrainedBase") {
    settings.model.freeze_base = false;
    settings.options = {};
  }
  settings.ranks = 0;
  const testing::RunOutcome reference = testing::train(settings);
  EXPECT_LT(reference.steps.back().loss, reference.steps.front().loss * 0.99)
      << "nothing was learned";
  std::int64_t num_trained = 0;
  for (const ParamShape& param : gpt_shape(settings.model).params) {
    num_trained += param.trainable ? param.numel() : 0;
  }
  for (const int ranks : {1, 2, 3}) {
    settings.ranks = ranks;
    const testing::RunOutcome sharded = testing::train(settings);
    const testing::Difference off = testing::difference(sharded, reference);
    if (ranks == 1) {
      EXPECT_TRUE(testing::same_bits(sharded, reference)) << off.describe();
      // Two moments; in fp32 a parameter is its own master.
      EXPECT_EQ(sharded.peaks.at({Tier::kDevice, Role::kOptimizer}), 8 * num_trained);
    } else {
      EXPECT_LE(off.largest(), testing::parity_bounds(settings.model).step)
          << ranks << " ranks: " << off.describe();
      EXPECT_FALSE(off.largest() == 0) << "a comparison of a run with itself proves nothing";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpt, AdapterTraining,
                         ::testing::Values("Plain", "Everything", "SomeBlocks", "TrainedBase"),
                         [](const auto& info) { return std::string(info.param); });

class AdapterFiles : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (directory_.path() / name).string(); }
  ExportOptions export_options() const {
    ExportOptions options;
    options.checkpoint = path("run");
    options.to = path("out");
    return options;
  }
  nlohmann::json parsed(const std::string& name) const {
    return nlohmann::json::parse(read_whole(path(name)));
  }
  std::string refusal(const GptOptions& options) const {
    return message_of([&] { open_weights(path("model.safetensors"), options); });
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(AdapterFiles, OfABaseLeaveAdaptersAsTheyStart) {
  const GptOptions options = with_adapters();
  const Gpt base(without_adapters(options), at::kCPU, kBaseSeed + 1);
  for (const GptNaming naming : {GptNaming::kTessera, GptNaming::kGpt2}) {
    write_weights(path("model.safetensors"), weights_of(base, naming, ""));
    const Gpt gpt(options, at::kCPU, kBaseSeed, open_weights(path("model.safetensors"), options));
    const auto drawn = by_name(Gpt(options, at::kCPU, kBaseSeed));
    const auto of_base = by_name(base);
    for (const auto& [name, tensor] : by_name(gpt)) {
      EXPECT_TRUE(at::equal(tensor, is_adapter(name) ? drawn.at(name) : of_base.at(name))) << name;
    }
  }
}

TEST_F(AdapterFiles, ThatHaveAdaptersMustHaveThemAllAndTheModelToo) {
  const GptOptions options = with_adapters();
  const Gpt saved(options, at::kCPU, kBaseSeed + 1);
  scatter(saved, 0.1);
  std::vector<WeightTensor> weights = weights_of(saved, GptNaming::kTessera, "");
  write_weights(path("model.safetensors"), weights);
  const Gpt gpt(options, at::kCPU, kBaseSeed, open_weights(path("model.safetensors"), options));
  const auto expected = by_name(saved);
  for (const auto& [name, tensor] : by_name(gpt)) {
    EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
  }
  EXPECT_HAS(refusal(without_adapters(options)), "not in the model are");
  EXPECT_HAS(refusal(without_adapters(options)), "and --adapters R, since they have adapters");
  std::erase_if(
      weights, [](const WeightTensor& weight) { return weight.name == "blocks.1.down.adapter_b"; });
  write_weights(path("model.safetensors"), weights);
  EXPECT_HAS(refusal(options), "missing are \"blocks.1.down.adapter_b\"");
}

TEST_F(AdapterFiles, MergedAreTheBaseAndTheScaledProduct) {
  for (const bool tie_head : {false, true}) {
    GptOptions options = with_adapters();
    options.tie_head = tie_head;
    const Gpt gpt(options, at::kCPU, kBaseSeed);
    scatter(gpt, 0.1);
    std::filesystem::remove_all(path("run"));
    write_gpt_checkpoint(path("run"), gpt, {.num_ranks = 2});
    const auto tensors = by_name(gpt);
    for (const GptNaming naming : {GptNaming::kGpt2, GptNaming::kTessera}) {
      ExportOptions exported = export_options();
      exported.naming = naming;
      exported.tile_bytes = 4096;  // several bands
      std::filesystem::remove_all(exported.to);
      const ExportResult result = export_weights(exported);
      EXPECT_EQ(result.num_merged, 8);
      EXPECT_EQ(result.num_tensors, tie_head ? 28 : 29);
      Gpt merged(without_adapters(options), at::kCPU, 0,
                 open_weights(exported.to, without_adapters(options)));
      for (const auto& [name, tensor] : by_name(merged)) {
        at::Tensor expected = tensors.at(name).to(at::kDouble);
        const std::string layer = name.substr(0, name.size() - std::string("weight").size());
        double magnitude = 0;
        if (name.ends_with("weight") && tensors.contains(layer + kAdapterA)) {
          const at::Tensor a = tensors.at(layer + kAdapterA).to(at::kDouble);
          const at::Tensor b = tensors.at(layer + kAdapterB).to(at::kDouble);
          expected = expected + at::mm(b, a) * (5.0 / 3);
          // Of a sum of three products, its product with the scale, itself rounded, and the sum.
          magnitude = (at::mm(b.abs(), a.abs()) * (5.0 / 3)).max().item<double>() +
                      expected.abs().max().item<double>();
          EXPECT_FALSE(at::equal(tensor, tensors.at(name))) << name;
        }
        const double apart = (tensor.to(at::kDouble) - expected).abs().max().item<double>();
        EXPECT_LE(apart, 6 * 0x1p-24 * magnitude) << name;
      }
      // Computes what the model with adapters computes, but for rounding; see expect_formula() in
      // gpt_test.cpp.
      const Batch batch = tokens_of(options);
      Gpt same(options, at::kCPU, 0, std::make_shared<const GptCheckpoint>(path("run")));
      const double loss = same.loss(batch.ids, batch.targets).item<double>();
      const double bound = 2 * 40 * std::sqrt(4.0 * 32) * 0x1p-24 * loss;
      EXPECT_NEAR(merged.loss(batch.ids, batch.targets).item<double>(), loss, bound);
    }
  }
}

TEST_F(AdapterFiles, AloneHaveTheNamesAndTheConfigOfPeft) {
  const Gpt gpt(with_adapters(), at::kCPU, kBaseSeed);
  scatter(gpt, 0.1);
  write_gpt_checkpoint(path("run"), gpt, {.num_ranks = 3});
  ExportOptions exported = export_options();
  exported.adapters = ExportAdapters::kAlone;
  exported.shard_bytes = 1;  // one file all the same
  const ExportResult result = export_weights(exported);
  EXPECT_EQ(result.num_tensors, 16);
  EXPECT_EQ(result.num_files, 1);
  const checkpoint::SafetensorsReader reader(path("out/adapter_model.safetensors"));
  EXPECT_EQ(reader.entries().size(), 16U);
  const auto tensors = by_name(gpt);
  const std::map<std::string, std::string> names = {{"attention.qkv", "attn.c_attn"},
                                                    {"attention.out", "attn.c_proj"},
                                                    {"up", "mlp.c_fc"},
                                                    {"down", "mlp.c_proj"}};
  for (const auto& [ours, gpt2] : names) {
    for (const char* const side : {"A", "B"}) {
      const at::Tensor& tensor =
          tensors.at("blocks.1." + ours + (*side == 'A' ? ".adapter_a" : ".adapter_b"));
      const std::string name =
          "base_model.model.transformer.h.1." + gpt2 + ".lora_" + side + ".weight";
      const checkpoint::TensorEntry* const entry = reader.find(name);
      ASSERT_NE(entry, nullptr) << name;
      EXPECT_EQ(entry->shape, tensor.sizes().vec());
      at::Tensor read = at::empty(tensor.sizes());
      reader.read(name, 0,
                  {static_cast<std::byte*>(read.mutable_data_ptr()),
                   static_cast<std::size_t>(read.nbytes())});
      EXPECT_TRUE(at::equal(read, tensor)) << name;
    }
  }
  const nlohmann::json config = parsed("out/adapter_config.json");
  EXPECT_EQ(config["r"], kRank);
  EXPECT_EQ(config["lora_alpha"], 5);
  EXPECT_EQ(config["fan_in_fan_out"], true);
  EXPECT_FALSE(std::filesystem::exists(path("out/config.json")));

  std::filesystem::remove_all(path("run"));
  write_gpt_checkpoint(path("run"), Gpt(gpt_preset("micro"), at::kCPU, kBaseSeed));
  exported.to = path("other");
  EXPECT_HAS(message_of([&] { export_weights(exported); }),
             ": its model has no adapters; leave --adapters out");
  EXPECT_FALSE(std::filesystem::exists(path("other")));
}

TEST_F(AdapterFiles, PeftComputesTheSameLogits) {
  if (!has_peft()) {
    GTEST_SKIP() << "python3 has no transformers with peft";
  }
  for (const bool other : {false, true}) {
    GptOptions options = with_adapters();
    options.sequence = 11;
    options.tie_head = other;
    options.gelu_tanh = other;
    options.adapter_alpha = other ? 2.5 : 6;
    Gpt gpt(options, at::kCPU, kBaseSeed);
    scatter(gpt, 0.1);
    for (const std::string name : {"run", "out", "base-run", "base"}) {
      std::filesystem::remove_all(path(name));
    }
    write_gpt_checkpoint(path("run"), gpt, {.num_ranks = 2});
    ExportOptions exported = export_options();
    exported.adapters = ExportAdapters::kAlone;
    export_weights(exported);

    const Gpt base(without_adapters(options), at::kCPU, kBaseSeed);
    const auto tensors = by_name(gpt);
    for (const NamedParam& param : base.params()) {
      const at::NoGradGuard no_grad;
      param.tensor.copy_(tensors.at(param.name));
    }
    write_gpt_checkpoint(path("base-run"), base);
    ExportOptions exported_base = export_options();
    exported_base.checkpoint = path("base-run");
    exported_base.to = path("base");
    export_weights(exported_base);

    const at::Tensor ids = at::arange(22, at::kLong).remainder(options.vocabulary).view({2, 11});
    write_weights(path("expected"), {weight_tensor("ids", ids.to(at::kFloat)),
                                     weight_tensor("logits", all_logits(gpt, ids))});
    EXPECT_EQ(run_transformers({"adapt", path("base"), exported.to, path("expected"), "1e-4"}), 0)
        << other;
    std::filesystem::remove(path("expected"));
  }
}

}  // namespace
}  // namespace tessera::models
