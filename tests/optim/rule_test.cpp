// The rules on the host: what each computes, and that nothing but the numbers decides it.
#include "tessera/optim/rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tests/optim/update_case.h"

namespace tessera::optim {
namespace {

UpdateScalars scalars_of_step(std::int64_t step) {
  UpdateScalars scalars;
  scalars.step = step;
  scalars.lr = 1e-3;
  scalars.gradient_scale = 0.37;
  return scalars;
}

TEST(Update, DoesNotDependOnHowATensorIsCut) {
  constexpr std::size_t kNumel = 517;
  const auto gradient = random_floats(kNumel, 1e-3, 3);
  for (const auto& [name, rule] : all_rules()) {
    Weights whole(kNumel);
    update(rule, scalars_of_step(1), whole.span(gradient.data()));
    Weights cut(kNumel);
    const UpdateSpan all = cut.span(gradient.data());
    for (std::int64_t begin = 0, part = 1; begin < all.numel; begin += part, part = 2 * part + 1) {
      UpdateSpan span = all;
      span.master += begin;
      span.gradient = gradient.data() + begin;
      span.states = {all.states[0] + begin, all.states[1] + begin};
      span.numel = std::min(part, all.numel - begin);
      update(rule, scalars_of_step(1), span);
    }
    EXPECT_TRUE(cut == whole) << name;
  }
}

TEST(Update, WritesTheRoundedMasterAsTheParameter) {
  constexpr std::size_t kNumel = 300;
  const auto gradient = random_floats(kNumel, 1, 5);
  Weights bf16(kNumel);
  UpdateSpan span = bf16.span(gradient.data());
  span.parameter = bf16.parameter.data();
  update(RuleOptions{}, scalars_of_step(1), span);
  Weights fp16(kNumel);
  span = fp16.span(gradient.data());
  span.parameter = fp16.parameter.data();
  span.parameter_dtype = DType::kFloat16;
  update(RuleOptions{}, scalars_of_step(1), span);
  ASSERT_TRUE(same_bits(bf16.master, fp16.master));
  for (std::size_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(bf16.parameter[i], to_bfloat16(bf16.master[i]).bits) << i;
    ASSERT_EQ(fp16.parameter[i], to_float16(fp16.master[i]).bits) << i;
  }
}

TEST(Update, FoldsTheGradientScaleInAsIfTheGradientHadBeenScaled) {
  constexpr std::size_t kNumel = 200;
  const auto halves = to_bfloat16s(random_floats(kNumel, 1, 5));
  std::vector<float> scaled;
  for (const BFloat16 half : halves) {
    scaled.push_back(to_float(half) * 0.37F);
  }
  for (const auto& [name, rule] : all_rules()) {
    Weights folded(kNumel);
    update(rule, scalars_of_step(1), folded.span(halves.data()));
    Weights before(kNumel);
    UpdateScalars scalars = scalars_of_step(1);
    scalars.gradient_scale = 1;
    update(rule, scalars, before.span(scaled.data()));
    EXPECT_TRUE(folded == before) << name;
  }
}

TEST(Update, TakesTheWeightDecayOfTheGroup) {
  constexpr std::size_t kNumel = 100;
  const auto gradient = random_floats(kNumel, 1e-3, 5);
  for (const auto& [name, rule] : all_rules()) {
    RuleOptions without = rule;
    without.weight_decay = 0;
    RuleOptions strong = rule;
    strong.weight_decay = 0.25;
    UpdateScalars no_decay = scalars_of_step(1);
    no_decay.weight_decay_scale = 0;
    Weights a(kNumel), b(kNumel), c(kNumel);
    update(strong, no_decay, a.span(gradient.data()));
    update(without, scalars_of_step(1), b.span(gradient.data()));
    update(strong, scalars_of_step(1), c.span(gradient.data()));
    EXPECT_TRUE(a == b) << name;
    EXPECT_FALSE(a == c) << name;
  }
}

// Numbers that are exact in fp32, so that the expected ones can be written down.
TEST(Update, GivesTheNumbersOnPaper) {
  UpdateScalars scalars;
  scalars.lr = 0.25;
  float master = 1;
  float state = 0;
  float gradient = 0.5F;
  UpdateSpan span;
  span.master = &master;
  span.gradient = &gradient;
  span.states = {&state, nullptr};
  span.numel = 1;

  RuleOptions sgd;
  sgd.kind = RuleKind::kSgd;
  sgd.weight_decay = 0.5;
  update(sgd, scalars, span);
  EXPECT_EQ(master, 1 - 0.25F * (0.5F + 0.5F * 1));

  RuleOptions momentum = sgd;
  momentum.weight_decay = 0;
  momentum.momentum = 0.5;
  master = 1;
  update(momentum, scalars, span);
  EXPECT_EQ(state, 0.5F);
  EXPECT_EQ(master, 0.875F);
  scalars.step = 2;
  gradient = -1;
  update(momentum, scalars, span);
  EXPECT_EQ(state, -0.75F);
  EXPECT_EQ(master, 0.875F + 0.25F * 0.75F);

  RuleOptions lion;
  lion.kind = RuleKind::kLion;
  lion.beta1 = 0.5;
  lion.beta2 = 0.75;
  lion.weight_decay = 0.5;
  master = 2;
  state = 1;
  gradient = -8;
  update(lion, scalars, span);
  EXPECT_EQ(master, 2 * (1 - 0.125F) + 0.25F);  // the sign of 0.5 - 4 is negative
  EXPECT_EQ(state, 0.75F - 2);
  state = 1;
  gradient = -1;
  master = 2;
  update(lion, scalars, span);
  EXPECT_EQ(master, 1.75F);  // the sign of 0.5 - 0.5 is zero
}

TEST(Update, MakesTheFirstMomentumTheGradientItself) {
  RuleOptions rule;
  rule.kind = RuleKind::kSgd;
  rule.momentum = 0.9;
  rule.weight_decay = 0;
  const std::vector<float> gradient = {-0.0F, 0.0F, 1e-45F, -3};
  Weights weights(gradient.size());
  UpdateScalars scalars;
  update(rule, scalars, weights.span(gradient.data()));
  EXPECT_TRUE(same_bits(weights.first, gradient));
}

// Lion in fp64 beside ours in fp32. The bound: per step, the weight's product, the step's product
// and the sum lose half a unit in the last place each at most (the fma saves one of them); weights
// stay below 0.25 here. Where fp32 and fp64 see another sign the direction is within rounding of
// zero; such elements are counted, and there are none.
TEST(Update, FollowsLionInDoublePrecision) {
  constexpr std::size_t kNumel = 2000;
  constexpr int kSteps = 20;
  RuleOptions rule;
  rule.kind = RuleKind::kLion;
  rule.beta2 = 0.99;
  rule.weight_decay = 0.1;
  Weights ours(kNumel);
  std::vector<double> weight(ours.master.begin(), ours.master.end());
  std::vector<double> average(kNumel, 0.0);
  UpdateScalars scalars;
  scalars.lr = 1e-3;
  for (int step = 1; step <= kSteps; ++step) {
    const auto gradient = random_floats(kNumel, 1e-3, static_cast<std::uint64_t>(step));
    scalars.step = step;
    update(rule, scalars, ours.span(gradient.data()));
    for (std::size_t i = 0; i < kNumel; ++i) {
      const double direction = rule.beta1 * average[i] + (1 - rule.beta1) * gradient[i];
      const double sign = direction > 0 ? 1 : (direction < 0 ? -1 : 0);
      weight[i] = weight[i] * (1 - scalars.lr * rule.weight_decay) - scalars.lr * sign;
      average[i] = rule.beta2 * average[i] + (1 - rule.beta2) * gradient[i];
    }
  }
  constexpr double kUnit = std::numeric_limits<float>::epsilon() / 2;
  for (std::size_t i = 0; i < kNumel; ++i) {
    ASSERT_LT(std::abs(weight[i]), 0.25);
    // lr and the factor are rounded once, too: two more relative errors per step.
    EXPECT_NEAR(ours.master[i], weight[i], kSteps * 4 * kUnit * 0.25) << i;
  }
}

// Adam in fp64 beside ours in fp32. Gradients are positive, so nothing cancels and relative errors
// add up: with u half a unit in the last place, after k steps exp_avg is off by 3ku at most
// (factor, product, sum), exp_avg_sq by 4ku, its root by 2ku, and the update, with its two
// divisions, sum and rounded scalars, by (5k + 8)u. It is below 2 lr, since no mean of the
// gradients is above twice the root of the mean of their squares. Each step rounds the weight three
// times.
TEST(Update, FollowsAdamInDoublePrecision) {
  constexpr std::size_t kNumel = 500;
  constexpr int kSteps = 10;
  constexpr double kUnit = std::numeric_limits<float>::epsilon() / 2;
  for (const RuleKind kind : {RuleKind::kAdamW, RuleKind::kAdam}) {
    RuleOptions rule;
    rule.kind = kind;
    rule.weight_decay = 0.25;
    Weights ours(kNumel);
    for (float& weight : ours.master) {
      weight = std::abs(weight);  // so that L2 does not cancel, either
    }
    std::vector<double> weight(ours.master.begin(), ours.master.end());
    std::vector<double> average(kNumel, 0.0), squares(kNumel, 0.0);
    UpdateScalars scalars;
    scalars.lr = 1e-5;
    double bound = 0;
    for (int step = 1; step <= kSteps; ++step) {
      auto gradient = random_floats(kNumel, 0.25, static_cast<std::uint64_t>(step));
      for (float& value : gradient) {
        value = 1 + std::min(std::abs(value), 1.0F);
      }
      scalars.step = step;
      update(rule, scalars, ours.span(gradient.data()));
      for (std::size_t i = 0; i < kNumel; ++i) {
        const bool is_adamw = kind == RuleKind::kAdamW;
        const double g = gradient[i] + (is_adamw ? 0 : rule.weight_decay * weight[i]);
        weight[i] *= is_adamw ? 1 - scalars.lr * rule.weight_decay : 1;
        average[i] = rule.beta1 * average[i] + (1 - rule.beta1) * g;
        squares[i] = rule.beta2 * squares[i] + (1 - rule.beta2) * g * g;
        const double mean = average[i] / (1 - std::pow(rule.beta1, step));
        const double root = std::sqrt(squares[i] / (1 - std::pow(rule.beta2, step)));
        weight[i] -= scalars.lr * mean / (root + rule.eps);
      }
      bound += 2 * scalars.lr * (5 * step + 8) * kUnit + 3 * 0.25 * kUnit;
    }
    for (std::size_t i = 0; i < kNumel; ++i) {
      ASSERT_LT(std::abs(weight[i]), 0.25);
      EXPECT_NEAR(ours.master[i], weight[i], bound) << to_string(kind) << " " << i;
      EXPECT_NEAR(ours.first[i], average[i], 3 * kSteps * kUnit * average[i]) << i;
      EXPECT_NEAR(ours.second[i], squares[i], 4 * kSteps * kUnit * squares[i]) << i;
    }
  }
}

TEST(Update, LetsANonFiniteGradientReachTheWeight) {
  for (const auto& [name, rule] : all_rules()) {
    const std::vector<float> gradient = {std::numeric_limits<float>::quiet_NaN()};
    Weights weights(1);
    update(rule, scalars_of_step(1), weights.span(gradient.data()));
    EXPECT_TRUE(std::isnan(weights.master[0])) << name;
  }
}

TEST(Update, RefusesWhatNoLoopCanDo) {
  Weights weights(4);
  const std::vector<float> gradient(4);
  const UpdateSpan good = weights.span(gradient.data());
  UpdateSpan span = good;
  span.gradient_dtype = DType::kFloat64;
  EXPECT_THROW(update({}, {}, span), InternalError);
  span = good;
  span.parameter = weights.parameter.data();
  span.parameter_dtype = DType::kFloat32;
  EXPECT_THROW(update({}, {}, span), InternalError);
  span = good;
  span.states[1] = nullptr;
  EXPECT_THROW(update({}, {}, span), InternalError);
  span = good;
  span.master = nullptr;
  EXPECT_THROW(update({}, {}, span), InternalError);
  UpdateScalars step_zero;
  step_zero.step = 0;
  EXPECT_THROW(update({}, step_zero, good), InternalError);
}

TEST(RuleOptions, NameTheirStates) {
  RuleOptions rule;
  const auto names = [&] {
    const auto span = state_names(rule);
    return std::vector<std::string_view>(span.begin(), span.end());
  };
  using Names = std::vector<std::string_view>;
  EXPECT_EQ(names(), (Names{"exp_avg", "exp_avg_sq"}));
  rule.kind = RuleKind::kAdam;
  EXPECT_EQ(names(), (Names{"exp_avg", "exp_avg_sq"}));
  rule.kind = RuleKind::kLion;
  EXPECT_EQ(names(), Names{"exp_avg"});
  rule.kind = RuleKind::kSgd;
  EXPECT_EQ(names(), Names{});
  rule.momentum = 0.5;
  EXPECT_EQ(names(), Names{"momentum"});
}

TEST(RuleOptions, ComeFromTheOptionsOfTheRun) {
  Config config;
  const RuleOptions defaults = RuleOptions::from(config);
  EXPECT_EQ(defaults.kind, RuleKind::kAdamW);
  EXPECT_EQ(defaults.beta1, 0.9);
  EXPECT_EQ(defaults.beta2, 0.999);
  EXPECT_EQ(defaults.eps, 1e-8);
  EXPECT_EQ(defaults.weight_decay, 0.01);
  for (const RuleKind kind : {RuleKind::kAdamW, RuleKind::kAdam, RuleKind::kSgd, RuleKind::kLion}) {
    config.set("optim.kind", std::string(to_string(kind)));
    EXPECT_EQ(RuleOptions::from(config).kind, kind);
  }
  config.set("optim.momentum", 0.5);
  config.set("optim.beta1", 0.25);
  config.set("optim.beta2", 1.0);
  config.set("optim.eps", 1e-3);
  config.set("optim.weight_decay", 0.125);
  config.set("optim.kind", std::string("lion"));
  const RuleOptions given = RuleOptions::from(config);
  EXPECT_EQ(given.momentum, 0.5);
  EXPECT_EQ(given.beta1, 0.25);
  EXPECT_EQ(given.beta2, 1.0);
  EXPECT_EQ(given.eps, 1e-3);
  EXPECT_EQ(given.weight_decay, 0.125);
  config.set("optim.kind", std::string("adamw"));
  EXPECT_THROW(RuleOptions::from(config), ConfigError);  // 1 - beta2^step is zero
}

}  // namespace
}  // namespace tessera::optim
