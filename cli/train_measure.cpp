#include "cli/train_measure.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "cli/train_plan.h"
#include "models/gpt_modules.h"
#include "tessera/optim/rule.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::cli {
namespace {

// A run of a unit that is long enough to be told from its overhead, and short enough to be waited
// for.
constexpr double kOperations = 2e10;
constexpr std::int64_t kFewestTokens = 32;
// A part of the head's rows is as good as all of them, and does not need their memory.
constexpr std::int64_t kMostRows = 4096;
constexpr std::int64_t kUpdatedNumel = std::int64_t{1} << 20;
constexpr int kFewestRuns = 3;
constexpr int kMostRuns = 50;
constexpr double kBudgetS = 0.4;

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The first runs wake threads and fill caches; the fastest is the least disturbed.
double fastest_s(const std::function<void()>& run) {
  double fastest = seconds_of(run);
  double spent = fastest;
  for (int i = 1; i < kFewestRuns || (i < kMostRuns && spent < kBudgetS); ++i) {
    const double seconds = seconds_of(run);
    fastest = std::min(fastest, seconds);
    spent += seconds;
  }
  return fastest;
}

// Values as they are in training: denormal or infinite ones would take their own time.
void fill_params(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& param : module.parameters()) {
    param.normal_(0, 0.02);
  }
}

// Seconds per token.
double block_s(const models::GptOptions& model, const models::ParamOptions& params) {
  const double numel = 12.0 * static_cast<double>(model.width) * static_cast<double>(model.width);
  const std::int64_t tokens = std::clamp(static_cast<std::int64_t>(kOperations / (6 * numel)),
                                         std::min(kFewestTokens, model.sequence), model.sequence);
  models::BlockImpl block(model, params);
  fill_params(block);
  const at::Tensor x = at::randn({1, tokens, model.width}, params.tensor).set_requires_grad(true);
  const double seconds = fastest_s([&] { block.forward(x).sum().backward(); });
  return seconds / static_cast<double>(tokens) * (model.recompute ? 4.0 / 3 : 1.0);
}

double head_s(models::GptOptions model, const models::ParamOptions& params) {
  const auto all_rows = static_cast<double>(model.vocabulary);
  model.vocabulary = std::min(model.vocabulary, kMostRows);
  const double numel = static_cast<double>(model.vocabulary * model.width);
  const std::int64_t tokens = std::clamp(static_cast<std::int64_t>(kOperations / (6 * numel)),
                                         std::min(kFewestTokens, model.sequence), model.sequence);
  models::HeadImpl head(model, params, at::Tensor());
  fill_params(head);
  const at::Tensor x = at::randn({1, tokens, model.width}, params.tensor).set_requires_grad(true);
  const at::Tensor targets = at::randint(model.vocabulary, {1, tokens}, at::kLong);
  const double seconds = fastest_s([&] { head.forward(x, targets).backward(); });
  return seconds / static_cast<double>(tokens) * all_rows / static_cast<double>(model.vocabulary);
}

// Seconds per element, on one thread.
double update_s(const optim::RuleOptions& rule) {
  const auto numel = static_cast<std::size_t>(kUpdatedNumel);
  std::vector<float> master(numel, 0.5F);
  const std::vector<float> gradient(numel, 0.01F);
  std::vector<std::vector<float>> states(optim::kMaxStates, std::vector<float>(numel, 0.02F));
  optim::UpdateSpan span;
  span.master = master.data();
  span.gradient = gradient.data();
  span.numel = kUpdatedNumel;
  for (std::size_t i = 0; i < optim::kMaxStates; ++i) {
    span.states[i] = states[i].data();
  }
  optim::UpdateScalars scalars;
  scalars.lr = 1e-4;
  return fastest_s([&] { optim::update(rule, scalars, span); }) /
         static_cast<double>(kUpdatedNumel);
}

}  // namespace

CpuTime measure_cpu(const TrainPlan& plan) {
  models::ParamOptions params;
  params.tensor = at::TensorOptions().dtype(shard::scalar_type_of(plan.model.dtype));
  params.trained = plan.model.trains_base();
  const double tokens =
      static_cast<double>(plan.tokens_per_step()) / static_cast<double>(plan.batch.num_ranks);
  CpuTime time;
  time.compute_s = tokens * (static_cast<double>(plan.model.layers) * block_s(plan.model, params) +
                             head_s(plan.model, params));
  std::int64_t shard_numel = 0;
  for (const planner::ParamShape& param : plan.memory->shapes.params) {
    if (param.trainable) {
      shard_numel +=
          shard::Layout(param.numel, plan.batch.num_ranks, plan.model.dtype).shard_numel();
    }
  }
  time.update_s = static_cast<double>(shard_numel) *
                  update_s(optim::RuleOptions::from(plan.config)) / plan.num_threads;
  return time;
}

}  // namespace tessera::cli
