// Our rules beside torch's own optimizers, bit for bit.
//
// Where torch itself is not one arithmetic (element_rules.cuh, [Note: one arithmetic]) the tests
// see to it: MKL is asked for its AVX2 code, whose root is the IEEE one; a torch whose sums are not
// fused on this processor, or whose root is still another, is skipped aloud.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <torch/optim.h>
#include <torch/types.h>

#include "tessera/optim/rule.h"

namespace tessera::optim {
namespace {

constexpr std::int64_t kNumel = 100003;  // odd: vector bodies and scalar ends
constexpr int kSteps = 20;

// Before torch calls MKL for the first time: it reads its settings then.
class ExactRoots : public ::testing::Environment {
 public:
  void SetUp() override {
    setenv("MKL_CBWR", "AVX2", /*overwrite=*/1);
    at::set_num_threads(1);  // tests run side by side
  }
};
const auto* const kExactRoots = ::testing::AddGlobalTestEnvironment(new ExactRoots);

bool is_fused() {
  // 1 + 2^-12, squared, minus its rounded square: zero unless the product is kept whole.
  const float root = 1 + 0x1p-12F;
  const torch::Tensor value = torch::full({64}, root);
  const torch::Tensor rounded = torch::full({64}, -(root * root));
  return torch::add(rounded, value, root).count_nonzero().item<std::int64_t>() == 64;
}

bool has_exact_roots() {
  const torch::Tensor squares = torch::rand({kNumel});
  const torch::Tensor roots = squares.sqrt();
  const auto* square = squares.const_data_ptr<float>();
  const auto* root = roots.const_data_ptr<float>();
  for (std::int64_t i = 0; i < kNumel; ++i) {
    if (std::sqrt(square[i]) != root[i]) {
      return false;
    }
  }
  return true;
}

struct Trial {
  std::string name;
  RuleOptions rule;
  double lr = 1e-3;
};

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const Trial& trial,
                                                         const torch::Tensor& weight) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const RuleOptions& rule = trial.rule;
  const std::vector<torch::Tensor> weights = {weight};
  const auto betas = std::make_tuple(rule.beta1, rule.beta2);
  switch (rule.kind) {
    case RuleKind::kAdamW:
      return std::make_unique<torch::optim::AdamW>(
          weights,
          AdamWOptions(trial.lr).betas(betas).eps(rule.eps).weight_decay(rule.weight_decay));
    case RuleKind::kAdam:
      return std::make_unique<torch::optim::Adam>(
          weights,
          AdamOptions(trial.lr).betas(betas).eps(rule.eps).weight_decay(rule.weight_decay));
    case RuleKind::kSgd:
      return std::make_unique<torch::optim::SGD>(
          weights, SGDOptions(trial.lr).momentum(rule.momentum).weight_decay(rule.weight_decay));
    case RuleKind::kLion:
      break;
  }
  ADD_FAILURE() << "torch has no " << to_string(rule.kind);
  return nullptr;
}

std::vector<Trial> trials() {
  const auto trial = [](RuleKind kind, double lr, double weight_decay) {
    Trial out;
    out.rule.kind = kind;
    out.rule.weight_decay = weight_decay;
    out.lr = lr;
    out.name = std::string(to_string(kind)) + " lr " + std::to_string(lr) + " weight decay " +
               std::to_string(weight_decay);
    return out;
  };
  std::vector<Trial> all;
  for (const RuleKind kind : {RuleKind::kAdamW, RuleKind::kAdam, RuleKind::kSgd}) {
    all.push_back(trial(kind, 1e-3, 0.01));
    all.push_back(trial(kind, 6e-4, 0.1));
    all.push_back(trial(kind, 0.037, 0));
    all.push_back(trial(kind, 3e-4, 0.1));
    all.back().rule.beta1 = 0.95;
    all.back().rule.beta2 = 0.98;
    all.back().rule.eps = 1e-6;
    all.back().rule.momentum = 0.9;
    all.back().name += ", other betas";
  }
  return all;
}

// Elements of the weight that differ after kSteps.
std::int64_t count_different(const Trial& trial, const torch::Tensor& initial, double scale) {
  const torch::Tensor theirs = initial.clone().set_requires_grad(true);
  const auto optimizer = torch_optimizer(trial, theirs);
  const torch::Tensor ours = initial.clone();
  const torch::Tensor first = torch::zeros_like(initial);
  const torch::Tensor second = torch::zeros_like(initial);
  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor gradient = torch::randn_like(initial) * scale;
    theirs.mutable_grad() = gradient.clone();
    optimizer->step();
    UpdateSpan span;
    span.master = ours.mutable_data_ptr<float>();
    span.gradient = gradient.const_data_ptr<float>();
    span.states = {first.mutable_data_ptr<float>(), second.mutable_data_ptr<float>()};
    span.numel = initial.numel();
    UpdateScalars scalars;
    scalars.step = step;
    scalars.lr = trial.lr;
    update(trial.rule, scalars, span);
  }
  const torch::NoGradGuard no_grad;
  return (ours.view(torch::kInt32) != theirs.view(torch::kInt32)).sum().item<std::int64_t>();
}

TEST(TorchParity, EveryRuleOfTorchGivesTheSameBits) {
  torch::manual_seed(0);
  if (!is_fused()) {
    GTEST_SKIP() << "this torch multiplies and adds in two roundings on this processor";
  }
  if (!has_exact_roots()) {
    GTEST_SKIP() << "the square root of this torch is not IEEE's on this processor";
  }
  for (const Trial& trial : trials()) {
    for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{7}, std::int64_t{63}, kNumel}) {
      const torch::Tensor initial = torch::randn({numel}) * 0.02;
      EXPECT_EQ(count_different(trial, initial, 1e-3), 0) << trial.name << ", " << numel;
    }
  }
}

// Gradients from subnormal to huge: bits must agree where numbers are at their ends, too.
TEST(TorchParity, HoldsForGradientsOfEveryMagnitude) {
  torch::manual_seed(1);
  if (!is_fused() || !has_exact_roots()) {
    GTEST_SKIP() << "the arithmetic of this torch is not IEEE's with fma on this processor";
  }
  for (const double scale : {1e-40, 1e-20, 1.0, 1e10}) {
    EXPECT_EQ(count_different(trials().front(), torch::randn({1001}), scale), 0) << scale;
  }
}

}  // namespace
}  // namespace tessera::optim
