// The model against its definition: names and shapes of the PyTorch model, its formula in fp64, and
// what may change (recomputation, a tied head, frozen blocks) without changing a gradient's bits.
#include "models/gpt.h"

#include <cmath>
#include <functional>
#include <map>
#include <sstream>
#include <tuple>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tests/models/models_support.h"

namespace tessera::models {
namespace {

constexpr std::uint64_t kSeed = 7;

Batch make_batch(const GptOptions& options, std::int64_t rows, std::int64_t length) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor tokens = at::randint(0, options.vocabulary, {rows, length + 1}, generator,
                                        at::TensorOptions().dtype(at::kLong));
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous()};
}

Batch make_batch(const GptOptions& options) { return make_batch(options, 3, options.sequence); }

using Tensors = std::map<std::string, at::Tensor>;

Tensors backward(Gpt& gpt, const Batch& batch) {
  gpt.loss(batch.ids, batch.targets).backward();
  Tensors gradients;
  for (const NamedParam& param : gpt.params()) {
    gradients[param.name] = param.tensor.grad();
  }
  return gradients;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

TEST(Gpt, HasTheNamesAndShapesOfThePyTorchModelInItsOrder) {
  const Gpt gpt(gpt_preset("micro"), at::kCPU, kSeed);
  std::ostringstream list;
  for (const NamedParam& param : gpt.params()) {
    list << param.name << " " << param.tensor.sizes() << "\n";
  }
  EXPECT_EQ(list.str(),
            "tokens.weight [64, 32]\n"
            "positions.weight [16, 32]\n"
            "blocks.0.norm1.weight [32]\n"
            "blocks.0.norm1.bias [32]\n"
            "blocks.0.attention.qkv.weight [96, 32]\n"
            "blocks.0.attention.qkv.bias [96]\n"
            "blocks.0.attention.out.weight [32, 32]\n"
            "blocks.0.attention.out.bias [32]\n"
            "blocks.0.norm2.weight [32]\n"
            "blocks.0.norm2.bias [32]\n"
            "blocks.0.up.weight [128, 32]\n"
            "blocks.0.up.bias [128]\n"
            "blocks.0.down.weight [32, 128]\n"
            "blocks.0.down.bias [32]\n"
            "blocks.1.norm1.weight [32]\n"
            "blocks.1.norm1.bias [32]\n"
            "blocks.1.attention.qkv.weight [96, 32]\n"
            "blocks.1.attention.qkv.bias [96]\n"
            "blocks.1.attention.out.weight [32, 32]\n"
            "blocks.1.attention.out.bias [32]\n"
            "blocks.1.norm2.weight [32]\n"
            "blocks.1.norm2.bias [32]\n"
            "blocks.1.up.weight [128, 32]\n"
            "blocks.1.up.bias [128]\n"
            "blocks.1.down.weight [32, 128]\n"
            "blocks.1.down.bias [32]\n"
            "norm.weight [32]\n"
            "norm.bias [32]\n"
            "head.weight [64, 32]\n");
}

// The formula, from sums, products and elementary functions, in fp64.
class Formula {
 public:
  explicit Formula(const Gpt& gpt) : options_(gpt.options()) {
    for (const NamedParam& param : gpt.params()) {
      params_[param.name] = param.tensor.detach().to(at::kDouble).requires_grad_();
    }
  }

  at::Tensor loss(const Batch& batch) const {
    const std::int64_t length = batch.ids.size(1);
    at::Tensor x = params_.at("tokens.weight").index_select(0, batch.ids.flatten());
    x = x.view({-1, length, options_.width}) + params_.at("positions.weight").narrow(0, 0, length);
    for (std::int64_t i = 0; i < options_.layers; ++i) {
      const std::string block = "blocks." + std::to_string(i) + ".";
      x = x + attention(norm(x, block + "norm1"), block + "attention.");
      const at::Tensor up = linear(norm(x, block + "norm2"), block + "up");
      x = x + linear(gelu(up), block + "down");
    }
    const at::Tensor logits = at::matmul(norm(x, "norm"), params_.at("head.weight").t());
    const at::Tensor log_sums = logits.exp().sum(-1).log();
    const at::Tensor of_targets = logits.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1);
    return (log_sums - of_targets).mean();
  }

  const Tensors& params() const { return params_; }

 private:
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    const at::Tensor y =
        at::matmul(x, params_.at(name + ".weight").t()) + params_.at(name + ".bias");
    if (options_.adapter_rank == 0) {
      return y;
    }
    const double scale = options_.adapter_alpha / static_cast<double>(options_.adapter_rank);
    return y + at::matmul(at::matmul(x, params_.at(name + ".adapter_a").t()),
                          params_.at(name + ".adapter_b").t()) *
                   scale;
  }
  at::Tensor gelu(const at::Tensor& x) const {
    if (options_.gelu_tanh) {
      const double scale = std::sqrt(2.0 / std::acos(-1.0));
      return x * (at::tanh((x + x * x * x * 0.044715) * scale) + 1) / 2;
    }
    return x * (at::erf(x / std::sqrt(2.0)) + 1) / 2;
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name) const {
    const at::Tensor centred = x - x.mean(-1, /*keepdim=*/true);
    const at::Tensor variance = (centred * centred).mean(-1, /*keepdim=*/true);
    return centred / (variance + 1e-5).sqrt() * params_.at(name + ".weight") +
           params_.at(name + ".bias");
  }
  at::Tensor attention(const at::Tensor& x, const std::string& name) const {
    const std::int64_t length = x.size(1);
    const std::int64_t head_width = options_.width / options_.heads;
    const at::Tensor qkv = linear(x, name + "qkv");
    const at::Tensor future = at::ones({length, length}, at::kBool).triu(1);
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < options_.heads; ++h) {
      const at::Tensor q = qkv.narrow(2, h * head_width, head_width);
      const at::Tensor k = qkv.narrow(2, options_.width + h * head_width, head_width);
      const at::Tensor v = qkv.narrow(2, 2 * options_.width + h * head_width, head_width);
      const at::Tensor scores =
          at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(head_width));
      const at::Tensor weights = scores.masked_fill(future, -INFINITY).exp();
      heads.push_back(at::matmul(weights / weights.sum(-1, /*keepdim=*/true), v));
    }
    return linear(at::cat(heads, -1), name + "out");
  }

  const GptOptions options_;
  Tensors params_;
};

void expect_formula(const GptOptions& options) {
  Gpt gpt(options, at::kCPU, kSeed);
  {
    // Away from the initial values, where biases are zero, norms one and GELU almost linear.
    const at::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    for (const NamedParam& param : gpt.params()) {
      param.tensor.add_(at::randn(param.tensor.sizes(), generator, at::kFloat), 0.25);
    }
  }
  // A value passes through some 40 roundings in a row, each of a sum of at most 4 * width terms,
  // whose errors add up as in a random walk.
  const double bound = 40 * std::sqrt(4.0 * static_cast<double>(options.width)) * 0x1p-24;
  // Lengths in turn: positions are those of the present length, not of the first one.
  for (const std::int64_t length : {options.sequence, std::int64_t{5}, options.sequence}) {
    const Batch batch = make_batch(options, 3, length);
    const Formula formula(gpt);
    const at::Tensor expected = formula.loss(batch);
    expected.backward();
    const at::Tensor loss = gpt.loss(batch.ids, batch.targets);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), bound * expected.item<double>());
    loss.backward();
    for (const NamedParam& param : gpt.params()) {
      const at::Tensor& exact = formula.params().at(param.name).grad();
      const double error = (param.tensor.grad().to(at::kDouble) - exact).norm().item<double>();
      EXPECT_LE(error, bound * exact.norm().item<double>()) << param.name << ", length " << length;
      param.tensor.mutable_grad().reset();
    }
  }
}

TEST(Gpt, LossAndGradientsFollowTheFormula) { expect_formula(gpt_preset("micro")); }

TEST(Gpt, WithTheTanhGeluLossAndGradientsFollowItsFormula) {
  GptOptions options = gpt_preset("micro");
  options.gelu_tanh = true;
  expect_formula(options);
}

TEST(Gpt, WithAdaptersLossAndGradientsFollowTheFormula) {
  GptOptions options = gpt_preset("micro");
  options.adapter_rank = 3;
  options.adapter_alpha = 5;
  expect_formula(options);
}

// Counts how often an operator runs on this thread.
class CallCounter {
 public:
  explicit CallCounter(const std::string& name) {
    wanted = name;
    num_calls = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          num_calls += wanted == call.name() ? 1 : 0;
          return nullptr;
        }));
  }
  ~CallCounter() { at::removeCallback(handle_); }
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;
  int count() const { return num_calls; }

 private:
  // Callbacks are plain functions.
  static inline thread_local std::string wanted;
  static inline thread_local int num_calls = 0;
  at::CallbackHandle handle_;
};

TEST(Gpt, RecomputesEachBlockOnceInBackward) {
  for (const bool recompute : {false, true}) {
    GptOptions options = gpt_preset("micro");
    options.recompute = recompute;
    Gpt gpt(options, at::kCPU, kSeed);
    const CallCounter gelu("aten::gelu");
    backward(gpt, make_batch(options));
    EXPECT_EQ(gelu.count(), options.layers * (recompute ? 2 : 1));
  }
}

TEST(Gpt, RecomputedBlocksGiveTheSameBits) {
  GptOptions options = gpt_preset("micro");
  Gpt kept(options, at::kCPU, kSeed);
  options.recompute = true;
  Gpt recomputed(options, at::kCPU, kSeed);
  const Batch batch = make_batch(options);
  EXPECT_TRUE(
      same_bits(kept.loss(batch.ids, batch.targets), recomputed.loss(batch.ids, batch.targets)));
  const Tensors expected = backward(kept, batch);
  const Tensors found = backward(recomputed, batch);
  for (const auto& [name, gradient] : expected) {
    ASSERT_TRUE(found.at(name).defined()) << name;
    EXPECT_TRUE(same_bits(found.at(name), gradient)) << name;
  }
}

TEST(Gpt, ATiedHeadIsTheTokenTableAndSumsBothGradients) {
  GptOptions options = gpt_preset("micro");
  Gpt untied(options, at::kCPU, kSeed);
  options.tie_head = true;
  Gpt tied(options, at::kCPU, kSeed);
  EXPECT_EQ(tied.params().size() + 1, untied.params().size());
  {
    const at::NoGradGuard no_grad;
    const at::Tensor tokens = tied.params().front().tensor;  // starts as a head does
    untied.params().front().tensor.copy_(tokens);
    untied.params().back().tensor.copy_(tokens);
  }
  const Batch batch = make_batch(options);
  const Tensors expected = backward(untied, batch);
  const Tensors found = backward(tied, batch);
  EXPECT_EQ(found.count("head.weight"), 0U);
  EXPECT_TRUE(same_bits(found.at("tokens.weight"),
                        expected.at("tokens.weight") + expected.at("head.weight")));
  EXPECT_TRUE(same_bits(found.at("blocks.0.up.weight"), expected.at("blocks.0.up.weight")));
}

TEST(Gpt, FrozenBlocksGetNoGradientAndPassThoseOfOthersOn) {
  for (const bool recompute : {false, true}) {
    GptOptions options = gpt_preset("micro");
    Gpt trained(options, at::kCPU, kSeed);
    options.freeze = 1;
    options.recompute = recompute;
    Gpt frozen(options, at::kCPU, kSeed);
    const Batch batch = make_batch(options);
    const Tensors expected = backward(trained, batch);
    const Tensors found = backward(frozen, batch);
    for (const NamedParam& param : frozen.params()) {
      const bool is_frozen = param.name.starts_with("blocks.0.");
      EXPECT_EQ(param.tensor.requires_grad(), !is_frozen) << param.name;
      EXPECT_EQ(found.at(param.name).defined(), !is_frozen) << param.name;
      EXPECT_TRUE(is_frozen || same_bits(found.at(param.name), expected.at(param.name)))
          << param.name;
    }
  }
}

TEST(Gpt, InitialValuesComeFromSeedNameAndIndexAlone) {
  const GptOptions options = gpt_preset("micro");
  const Gpt gpt(options, at::kCPU, kSeed);
  const Gpt other_seed(options, at::kCPU, kSeed + 1);
  for (std::size_t i = 0; i < gpt.params().size(); ++i) {
    const auto& [name, tensor] = gpt.params()[i];
    std::vector<float> piece(7);  // from the middle: what one of several ranks would make
    const shard::ElementRange range{tensor.numel() / 3, 7};
    fill_initial(gpt_init(options, name), kSeed, name, range, DType::kFloat32, piece.data());
    const at::Tensor values = tensor.detach().flatten().narrow(0, range.begin, range.numel);
    EXPECT_TRUE(at::equal(values, at::tensor(piece))) << name;
    const bool random = gpt_init(options, name).kind != Init::Kind::kConstant;
    EXPECT_EQ(same_bits(tensor, other_seed.params()[i].tensor), !random) << name;
  }
}

TEST(Gpt, ShardedOnOneRankIsThePlainModelToTheBit) {
  for (const bool tie_head : {false, true}) {
    GptOptions options = gpt_preset("micro");
    options.tie_head = tie_head;
    options.freeze = 1;
    Gpt plain(options, at::kCPU, kSeed);
    Config config;
    config.set("seed", static_cast<std::int64_t>(kSeed));
    Runtime runtime(config);
    Engine engine(runtime);
    Gpt sharded(options, engine, kSeed);
    ASSERT_EQ(sharded.params().size(), plain.params().size());
    ASSERT_EQ(engine.num_params(), static_cast<int>(plain.params().size()));
    for (int id = 0; id < engine.num_params(); ++id) {
      const NamedParam& expected = plain.params()[static_cast<std::size_t>(id)];
      const NamedParam& found = sharded.params()[static_cast<std::size_t>(id)];
      EXPECT_EQ(found.name, expected.name);
      EXPECT_EQ(engine.param(id).name(), expected.name);
      EXPECT_EQ(engine.param(id).trainable(), expected.tensor.requires_grad()) << found.name;
      EXPECT_TRUE(found.tensor.is_same(engine.tensor(id))) << found.name;
      EXPECT_TRUE(same_bits(engine.full_value(id), expected.tensor)) << found.name;
    }
    const Batch batch = make_batch(options);
    EXPECT_TRUE(
        same_bits(sharded.loss(batch.ids, batch.targets), plain.loss(batch.ids, batch.targets)));
  }
}

TEST(Gpt, RefusesASeedThatIsNotItsEngines) {
  Runtime runtime{Config()};
  Engine engine(runtime);
  EXPECT_EQ(message_of([&] { Gpt(gpt_preset("micro"), engine, 5); }),
            "a GPT with seed 5 on an engine with seed 0: the engine makes the initial values; give "
            "both the same seed");
}

TEST(Gpt, InitialValuesHaveTheDistributionsOfPyTorch) {
  const GptOptions options = gpt_preset("small");
  const auto expect = [&](const std::string& name, Init::Kind kind, double value) {
    EXPECT_EQ(gpt_init(options, name).kind, kind) << name;
    EXPECT_DOUBLE_EQ(gpt_init(options, name).value, value) << name;
  };
  expect("tokens.weight", Init::Kind::kNormal, 1);
  expect("positions.weight", Init::Kind::kNormal, 1);
  // Inputs of a linear layer: the width of 256, and four times that.
  expect("head.weight", Init::Kind::kUniform, 1.0 / 16);
  expect("blocks.3.attention.qkv.weight", Init::Kind::kUniform, 1.0 / 16);
  expect("blocks.3.attention.qkv.bias", Init::Kind::kUniform, 1.0 / 16);
  expect("blocks.0.attention.out.weight", Init::Kind::kUniform, 1.0 / 16);
  expect("blocks.3.up.weight", Init::Kind::kUniform, 1.0 / 16);
  expect("blocks.3.down.weight", Init::Kind::kUniform, 1.0 / 32);
  expect("blocks.3.down.bias", Init::Kind::kUniform, 1.0 / 32);
  expect("blocks.3.norm2.weight", Init::Kind::kConstant, 1);
  expect("norm.weight", Init::Kind::kConstant, 1);
  expect("norm.bias", Init::Kind::kConstant, 0);
  GptOptions tied = options;
  tied.tie_head = true;
  EXPECT_EQ(gpt_init(tied, "tokens.weight").kind, Init::Kind::kUniform);
  EXPECT_EQ(gpt_init(tied, "positions.weight").kind, Init::Kind::kNormal);
  EXPECT_THROW(gpt_init(options, "blocks.3.middle.weight"), InternalError);
}

TEST(Gpt, ComputesInLowPrecisionAndTheLossInFp32) {
  GptOptions options = gpt_preset("micro");
  Gpt exact(options, at::kCPU, kSeed);
  const Batch batch = make_batch(options);
  const double expected = exact.loss(batch.ids, batch.targets).item<double>();
  // Half a unit in the last place, through the same 40 roundings in a row as above; the loss is
  // near log(vocabulary) because logits are small, so errors of logits are small against it.
  const std::map<DType, double> half_units = {{DType::kBFloat16, 0x1p-9},
                                              {DType::kFloat16, 0x1p-12}};
  for (const auto& [dtype, half_unit] : half_units) {
    options.dtype = dtype;
    Gpt gpt(options, at::kCPU, kSeed);
    const at::Tensor loss = gpt.loss(batch.ids, batch.targets);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.item<double>(), expected, std::sqrt(40.0) * half_unit) << to_string(dtype);
    for (const auto& [name, gradient] : backward(gpt, batch)) {
      EXPECT_EQ(gradient.scalar_type(), gpt.params().front().tensor.scalar_type()) << name;
    }
    EXPECT_NE(gpt.params().front().tensor.scalar_type(), at::kFloat);
  }
}

TEST(Gpt, RefusesWhatIsNotABatchForIt) {
  const GptOptions options = gpt_preset("micro");
  Gpt gpt(options, at::kCPU, kSeed);
  const Batch batch = make_batch(options, 2, 17);
  EXPECT_EQ(message_of([&] { gpt.loss(batch.ids, batch.targets); }),
            "a sequence of 17 tokens: the model has positions for 16; give shorter sequences or a "
            "larger --seq");
  const Batch good = make_batch(options);
  for (const Batch& bad :
       {Batch{good.ids, good.targets.narrow(0, 0, 1)}, Batch{good.ids.to(at::kInt), good.targets},
        Batch{good.ids.flatten(), good.targets.flatten()}}) {
    EXPECT_NE(message_of([&] { gpt.loss(bad.ids, bad.targets); }).find("[batch, sequence]"),
              std::string::npos);
  }
}

std::string unit_of(const std::string& param) {
  if (param == "tokens.weight" || param == "positions.weight") {
    return "embedding";
  }
  constexpr std::size_t kIndex = std::string_view("blocks.").size();
  return param.starts_with("blocks.") ? param.substr(0, param.find('.', kIndex)) : "head";
}

TEST(GptSize, EqualsTheBuiltModel) {
  // Vocabulary and sequence that make a block, the embedding and the head the largest unit.
  const std::map<std::string, std::pair<std::int64_t, std::int64_t>> shapes = {
      {"blocks.0", {7, 16}}, {"embedding", {1000, 16}}, {"head", {1000, 1}}};
  for (const auto& [largest, shape] : shapes) {
    for (const bool tie_head : {false, true}) {
      GptOptions options = gpt_preset("micro");
      std::tie(options.vocabulary, options.sequence) = shape;
      options.tie_head = tie_head;
      options.adapter_rank = tie_head ? 3 : 0;
      options.adapter_alpha = 6;
      const Gpt gpt(options, at::kCPU, kSeed);
      std::int64_t num_params = 0;
      std::map<std::string, std::int64_t> units;
      for (const auto& [name, tensor] : gpt.params()) {
        num_params += tensor.numel();
        units[unit_of(name)] += tensor.numel();
      }
      units["head"] += tie_head ? gpt.params().front().tensor.numel() : 0;
      EXPECT_EQ(gpt_size(options).num_params, num_params);
      EXPECT_EQ(gpt_size(options).largest_unit, units[largest]) << largest;
      for (const auto& [unit, numel] : units) {
        EXPECT_LE(numel, units[largest]) << unit;
      }
    }
  }
}

TEST(GptSize, OfThePresetsIsThatOfThePyTorchModel) {
  const std::map<std::string_view, std::int64_t> expected = {
      {"micro", 30080},         {"tiny", 470528},        {"small", 5289472},
      {"gpt2-124m", 163109376}, {"gpt-1b4", 1416744960}, {"gpt-7b", 6860447744},
      {"gpt-13b", 13105940480}};
  EXPECT_EQ(gpt_preset_names().size(), expected.size());
  for (const auto& [name, num_params] : expected) {
    EXPECT_EQ(gpt_size(gpt_preset(name)).num_params, num_params) << name;
    EXPECT_NO_THROW(gpt_preset(name).check()) << name;
  }
}

TEST(GptOptions, ErrorsNameOptionAndValueInOneLine) {
  const auto message = [](const std::function<void(GptOptions&)>& change) {
    GptOptions options = gpt_preset("micro");
    change(options);
    return message_of([&] { options.check(); });
  };
  EXPECT_EQ(message([](GptOptions& o) { o.layers = 0; }), "--layers 0 is not from 1 to 65536");
  EXPECT_EQ(message([](GptOptions& o) { o.heads = 3; }),
            "--heads 3 does not divide --width 32; the nearest that does is 2");
  EXPECT_EQ(message([](GptOptions& o) { o.vocabulary = -1; }),
            "--vocab -1 is not from 1 to 2147483648");
  EXPECT_EQ(message([](GptOptions& o) { o.sequence = std::int64_t{1} << 40; }),
            "--seq 1099511627776 is not from 1 to 2147483648");
  EXPECT_EQ(message([](GptOptions& o) { o.freeze = 3; }),
            "--freeze 3 is not from 0 to 2, the number of blocks");
  EXPECT_EQ(message([](GptOptions& o) { o.loss_chunk = -1; }),
            "--loss-chunk -1 is not from 0 (all at once) to 2147483648");
  EXPECT_EQ(message([](GptOptions& o) { o.dtype = DType::kInt64; }),
            "--precision int64 is none of fp32, bf16, fp16");
  EXPECT_EQ(message([](GptOptions& o) { o.freeze = 2; }), "no ConfigError");
  EXPECT_EQ(message_of([] { gpt_preset("large"); }),
            "--preset large is none of micro, tiny, small, gpt2-124m, gpt-1b4, gpt-7b, gpt-13b");
  GptOptions empty;
  EXPECT_NE(message_of([&] { Gpt(empty, at::kCPU, kSeed); }).find("width"), std::string::npos);
}

}  // namespace
}  // namespace tessera::models
