// The reference against torch's own training, and its rules: what is averaged, skipped and scaled.
#include "models/plain_trainer.h"

#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/optim/schedule.h"
#include "tests/models/models_support.h"

namespace tessera::models {
namespace {

// A trainer with all it stands on.
class Training {
 public:
  Training(const std::vector<NamedParam>& params, const Config& config)
      : trainer_(params, config, *kernels_, *device_, EngineOptions{}) {}
  PlainTrainer* operator->() { return &trainer_; }

 private:
  std::unique_ptr<device::Device> device_ = device::make_cpu_device();
  std::unique_ptr<optim::Kernels> kernels_ = optim::make_cpu_kernels(1);
  PlainTrainer trainer_;
};

// Plain gradient descent: an update shows its gradient.
Config descent(double lr = 1) {
  Config config;
  config.set("optim.kind", "sgd");
  config.set("optim.lr", lr);
  config.set("optim.weight_decay", 0.0);
  config.set("grad.clip_norm", 0.0);
  return config;
}

Config adamw(double lr, double clip_norm) {
  Config config;
  config.set("optim.lr", lr);
  config.set("optim.weight_decay", 0.1);
  config.set("grad.clip_norm", clip_norm);
  return config;
}

at::Tensor trained(const std::vector<float>& values, at::ScalarType dtype = at::kFloat) {
  return at::tensor(values).to(dtype).requires_grad_();
}

bool all_equal(const at::Tensor& tensor, const std::vector<float>& values) {
  return at::equal(tensor.detach().to(at::kFloat), at::tensor(values));
}

Batch make_batch(const GptOptions& options, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor tokens = at::randint(0, options.vocabulary, {2, options.sequence + 1}, generator,
                                        at::TensorOptions().dtype(at::kLong));
  return {tokens.narrow(1, 0, options.sequence).contiguous(),
          tokens.narrow(1, 1, options.sequence).contiguous()};
}

// Trains two copies of one model, by torch and by us, without clipping.
struct SideBySide {
  SideBySide()
      : options(gpt_preset("micro")),
        torch_model(options, at::kCPU, 1),
        model(options, at::kCPU, 1),
        training(model.params(), adamw(1e-2, 0)) {
    std::vector<at::Tensor> tensors;
    for (const NamedParam& param : torch_model.params()) {
      tensors.push_back(param.tensor);
    }
    params = tensors;
    optimizer = std::make_unique<torch::optim::AdamW>(
        std::move(tensors), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }

  // Returns the norms that both found.
  std::pair<double, double> step(std::uint64_t seed, double weight) {
    const Batch batch = make_batch(options, seed);
    optimizer->zero_grad();
    torch_model.loss(batch.ids, batch.targets).backward();
    const double no_limit = std::numeric_limits<double>::infinity();
    const double norm = torch::nn::utils::clip_grad_norm_(params, no_limit);
    optimizer->step();
    training->backward(model.loss(batch.ids, batch.targets), weight);
    return {norm, training->step().grad_norm};
  }

  const GptOptions options;
  Gpt torch_model;
  Gpt model;
  Training training;
  std::vector<at::Tensor> params;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

// Both norms are of fp32 gradients; torch's sums of up to 4096 squares (the largest parameter) and
// of 29 norms are in fp32.
constexpr double kNormBound = (4096 + 29) * 0x1p-24;

// On x86-64 ATen takes MKL's root, whose AVX-512 version is not the rounded one for some numbers.
bool torch_rounds_roots() {
  const at::Tensor numbers = at::arange(1, 20000, at::kFloat) / 7;
  return at::equal(numbers.sqrt(), numbers.to(at::kDouble).sqrt().to(at::kFloat));
}

TEST(PlainTrainer, UpdatesAsTorchDoesToTheBit) {
  if (!torch_rounds_roots()) {
    GTEST_SKIP() << "torch's square root is not the rounded one here; set "
                    "MKL_ENABLE_INSTRUCTIONS=AVX2, as ctest does";
  }
  // Token counts that are powers of two scale gradients without rounding.
  for (const double weight : {1.0, 32.0}) {
    SideBySide pair;
    for (std::uint64_t step = 0; step < 5; ++step) {
      const auto [expected, found] = pair.step(step, weight);
      EXPECT_NEAR(found, expected, kNormBound * expected);
    }
    for (std::size_t i = 0; i < pair.params.size(); ++i) {
      EXPECT_TRUE(at::equal(pair.params[i], pair.model.params()[i].tensor))
          << pair.model.params()[i].name << " with weight " << weight;
    }
  }
}

TEST(PlainTrainer, ClipsAsTorchDoes) {
  // Gradients are given, not computed from the weights, so nothing but clipping and the update
  // differs. Their norms vary, so that Adam, which is blind to a constant factor, sees what
  // clipping does.
  const double lr = 1e-2;
  const double clip = 1;
  constexpr int kSteps = 6;
  std::vector<at::Tensor> expected = {at::ones({100}), at::ones({9, 5})};
  std::vector<NamedParam> params;
  for (at::Tensor& tensor : expected) {
    params.push_back({"param" + std::to_string(params.size()), tensor.clone().requires_grad_()});
    tensor.requires_grad_();
  }
  torch::optim::AdamW optimizer(expected, torch::optim::AdamWOptions(lr).weight_decay(0.1));
  Training training(params, adamw(lr, clip));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
  double difference = 0x1p-23;  // of the two clip factors, relative: both are rounded to fp32
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    std::vector<at::Tensor> terms;
    for (std::size_t i = 0; i < params.size(); ++i) {
      const at::Tensor gradient =
          at::randn(expected[i].sizes(), generator, at::kFloat) * std::pow(10.0, step % 3 - 1);
      (expected[i] * gradient).sum().backward();
      terms.push_back((params[i].tensor * gradient).sum());
    }
    const double norm = torch::nn::utils::clip_grad_norm_(expected, clip);
    optimizer.step();
    training->backward(terms[0] + terms[1]);
    const double found = training->step().grad_norm;
    EXPECT_NEAR(found, norm, kNormBound * norm);
    difference = std::max(difference, std::abs(found - norm) / norm + 0x1p-23);
  }
  // An element moves by lr * m / sqrt(v). Both moments are sums that contain each gradient g, v
  // with a share of at least 1 / 1000 of g * g, so |m| <= sqrt(1000) * sqrt(v), and a relative
  // change of all g by d changes the quotient by at most 2 * d * sqrt(1000). The rest is rounding
  // of weights near one.
  const double bound = kSteps * (lr * 2 * difference * std::sqrt(1000.0) + 0x1p-24);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor error = (expected[i].detach() - params[i].tensor.detach()).abs();
    EXPECT_LE(error.max().item<double>(), bound) << params[i].name;
  }
}

TEST(PlainTrainer, ClippingScalesTheGradientToTheLimit) {
  Config config = descent();
  config.set("grad.clip_norm", 1.0);
  const at::Tensor weight = trained({0, 0});
  Training training({{"weight", weight}}, config);
  training->backward((weight * at::tensor({30.0F, 40.0F})).sum());
  EXPECT_DOUBLE_EQ(training->step().grad_norm, 50);
  // The factor is 1 / (50 + 1e-6), rounded to fp32.
  const double factor = 1 / (50 + 1e-6);
  EXPECT_NEAR(weight[0].item<double>(), -30 * factor, 0x1p-23);
  EXPECT_NEAR(weight[1].item<double>(), -40 * factor, 0x1p-23);
}

TEST(PlainTrainer, AveragesMicroBatchesByWeight) {
  const at::Tensor weight = trained({10});
  Training training({{"weight", weight}}, descent());
  training->backward((weight * 8).sum(), 3);   // loss 80
  training->backward((weight * -8).sum(), 5);  // loss -80
  const StepResult result = training->step();
  EXPECT_EQ(result.loss, (3 * 80 - 5 * 80) / 8.0);
  EXPECT_EQ(result.grad_norm, (5 * 8 - 3 * 8) / 8.0);
  EXPECT_EQ(result.weight, 8);
  EXPECT_TRUE(all_equal(weight, {10 + 2}));
}

TEST(PlainTrainer, AWeightOfZeroCountsForNothing) {
  const at::Tensor weight = trained({10});
  Training training({{"weight", weight}}, descent());
  training->backward((weight * 8).sum(), 5);
  training->backward((weight * 1000).sum(), 0);
  EXPECT_EQ(training->step().grad_norm, 8);
  EXPECT_TRUE(all_equal(weight, {2}));
}

TEST(PlainTrainer, AddsLowPrecisionGradientsOfMicroBatchesInFp32) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    Config config = descent();
    config.set("precision", dtype == at::kHalf ? "fp16" : "bf16");
    config.set("loss_scale.initial", 1.0);
    // Neither type holds 4097 (bf16: 8 bits, fp16: 11), so a sum in that type would lose the one.
    const at::Tensor weight = trained({0}, dtype);
    Training training({{"weight", weight}}, config);
    training->backward((weight * 4096).sum().to(at::kFloat));
    training->backward((weight * 1).sum().to(at::kFloat));
    EXPECT_EQ(training->step().grad_norm, 4097 / 2.0) << dtype;
  }
}

TEST(PlainTrainer, KeepsLowPrecisionWeightsExactInTheMaster) {
  Config config = descent(0x1p-10);
  config.set("precision", "bf16");
  const at::Tensor weight = trained({1}, at::kBFloat16);
  Training training({{"weight", weight}}, config);
  // bf16 has no number between 1 - 2^-8 and 1: without a master the weight would never move.
  for (int step = 0; step < 8; ++step) {
    training->backward(weight.sum().to(at::kFloat));
    training->step();
  }
  EXPECT_EQ(weight.item<float>(), 1 - 0x1p-7F);
}

TEST(PlainTrainer, ShowsTheMasterOfEveryParameterInTheModelsOrder) {
  Config config = descent(0x1p-10);
  config.set("precision", "bf16");
  const at::Tensor frozen = at::tensor({5.0F}).to(at::kBFloat16);
  const at::Tensor weight = trained({1}, at::kBFloat16);
  const at::Tensor wide = trained({3});
  Training training({{"frozen", frozen}, {"weight", weight}, {"wide", wide}}, config);
  training->backward((weight.to(at::kFloat) + wide).sum());
  training->step();
  const std::vector<at::Tensor> masters = training->masters();
  ASSERT_EQ(masters.size(), 3U);
  EXPECT_TRUE(all_equal(masters[0], {5}));
  EXPECT_TRUE(all_equal(masters[1], {1 - 0x1p-10F}));  // which bf16 cannot hold
  EXPECT_TRUE(all_equal(weight, {1}));
  EXPECT_TRUE(all_equal(masters[2], {3 - 0x1p-10F}));
  EXPECT_TRUE(all_equal(wide, {3 - 0x1p-10F}));
}

TEST(PlainTrainer, LeavesFrozenParametersAlone) {
  const at::Tensor weight = trained({1});
  const at::Tensor frozen = at::tensor({5.0F});
  Training training({{"frozen", frozen}, {"weight", weight}}, descent());
  training->backward((weight * frozen).sum());
  EXPECT_EQ(training->step().grad_norm, 5);
  EXPECT_TRUE(all_equal(frozen, {5}));
  EXPECT_TRUE(all_equal(weight, {-4}));
}

TEST(PlainTrainer, AParameterWithoutAGradientStaysAsItIs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor used = trained({1}, dtype);
    const at::Tensor sometimes = trained({1}, dtype);
    Config config = descent();
    config.set("optim.momentum", 0.5);
    Training training({{"used", used}, {"sometimes", sometimes}}, config);
    training->backward((used + 2 * sometimes).sum().to(at::kFloat));
    training->step();
    EXPECT_TRUE(all_equal(sometimes, {-1})) << dtype;
    training->backward(used.sum().to(at::kFloat));
    EXPECT_EQ(training->step().grad_norm, 1) << dtype;
    EXPECT_TRUE(all_equal(sometimes, {-1})) << dtype;  // no momentum moves it
  }
}

TEST(PlainTrainer, GivesGradientsBackAfterTheStep) {
  const at::Tensor weight = trained({1});
  Training training({{"weight", weight}}, descent());
  training->backward(weight.sum());
  EXPECT_TRUE(weight.grad().defined());
  training->step();
  EXPECT_FALSE(weight.grad().defined());
}

TEST(PlainTrainer, SkipsAStepWithoutFiniteGradientUnlessToldOtherwise) {
  for (const bool skip : {true, false}) {
    Config config = descent();
    config.set("grad.skip_nonfinite", skip);
    const at::Tensor weight = trained({1});
    const at::Tensor other = trained({1});
    Training training({{"weight", weight}, {"other", other}}, config);
    training->backward((weight * std::numeric_limits<float>::infinity() + other).sum());
    const StepResult result = training->step();
    EXPECT_EQ(result.skipped, skip);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_EQ(all_equal(weight, {1}), skip);
    training->backward(other.sum());
    const StepResult next = training->step();
    EXPECT_EQ(next.step, 2);
    EXPECT_FALSE(next.skipped);
    if (skip) {
      EXPECT_TRUE(all_equal(other, {0}));  // once, by the second step
    }
  }
}

TEST(PlainTrainer, ScalesTheLossOfFp16AndHalvesTheScaleOnOverflow) {
  Config config = descent(0x1p-20);
  config.set("precision", "fp16");
  config.set("loss_scale.initial", 1024.0);
  config.set("loss_scale.hysteresis", std::int64_t{1});
  const at::Tensor weight = trained({1}, at::kHalf);
  Training training({{"weight", weight}}, config);
  // 2^-30 is nothing in fp16; times 1024 it is not.
  training->backward((weight.to(at::kFloat) * 0x1p-30F).sum());
  StepResult result = training->step();
  EXPECT_EQ(result.grad_norm, 0x1p-30);
  EXPECT_EQ(result.loss, 0x1p-30);
  EXPECT_EQ(result.loss_scale, 1024);
  EXPECT_FALSE(result.skipped);
  // 100 * 1024 is more than fp16 holds.
  training->backward((weight.to(at::kFloat) * 100).sum());
  EXPECT_TRUE(training->step().skipped);
  training->backward((weight.to(at::kFloat) * 100).sum());
  result = training->step();
  EXPECT_EQ(result.loss_scale, 512);
  EXPECT_FALSE(result.skipped);
  EXPECT_EQ(result.grad_norm, 100);
}

TEST(PlainTrainer, FollowsTheSchedule) {
  Config config = descent(0.5);
  config.set("schedule.warmup_steps", std::int64_t{2});
  const at::Tensor weight = trained({1});
  Training training({{"weight", weight}}, config);
  const optim::ScheduleOptions schedule = optim::ScheduleOptions::from(config, 0);
  for (std::int64_t step = 0; step < 4; ++step) {
    training->backward(weight.sum());
    EXPECT_EQ(training->step().lr, optim::learning_rate(schedule, step));
  }
}

TEST(PlainTrainer, RefusesWhatIsNoLossOrNoWeight) {
  const at::Tensor weight = trained({1, 2});
  Training training({{"weight", weight}}, descent());
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(contains(message_of([&] { training->backward(weight * 2); }), "one number"));
  EXPECT_TRUE(contains(message_of([&] { training->backward(at::zeros({})); }), "one number"));
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(contains(message_of([&] { training->backward(weight.sum(), bad); }), "weight "));
  }
  EXPECT_TRUE(contains(message_of([&] { training->backward(weight.sum(), 0); }), "first weight"));
  EXPECT_TRUE(contains(message_of([&] { training->step(); }), "without a backward"));
}

TEST(PlainTrainer, AnExceptionInBackwardLeavesNothingBehind) {
  const at::Tensor weight = trained({1});
  const at::Tensor other = trained({1});
  Training training({{"weight", weight}, {"other", other}}, descent());
  training->backward((weight * 100 + other * 100).sum());
  at::Tensor inner = weight * 2;
  inner.register_hook([](const at::Tensor&) { throw std::runtime_error("the user's own"); });
  EXPECT_THROW(training->backward((inner + other * 7).sum()), std::runtime_error);
  training->backward((weight * 2).sum());
  EXPECT_EQ(training->step().grad_norm, 2);
  EXPECT_TRUE(all_equal(weight, {-1}));
  EXPECT_TRUE(all_equal(other, {1}));
}

TEST(PlainTrainer, LearnsABatchByHeart) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    GptOptions options = gpt_preset("micro");
    options.dtype = dtype;
    Gpt model(options, at::kCPU, 5);
    Config config;
    config.set("optim.lr", 1e-2);
    config.set("precision", std::string(to_string(dtype)));
    Training training(model.params(), config);
    const Batch batch = make_batch(options, 1);
    double first = 0;
    double last = 0;
    for (int step = 0; step < 12; ++step) {
      training->backward(model.loss(batch.ids, batch.targets),
                         static_cast<double>(batch.ids.numel()));
      last = training->step().loss;
      first = step == 0 ? last : first;
    }
    // Logits of a fresh head have a variance of 1/3, which adds half of it to the loss of a guess.
    EXPECT_NEAR(first, std::log(64.0) + 1.0 / 6, 0.1) << to_string(dtype);
    EXPECT_LT(last, 0.7 * first) << to_string(dtype);
  }
}

}  // namespace
}  // namespace tessera::models
