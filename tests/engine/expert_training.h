// A model with experts, units that only some ranks use in a step; trained sharded, and plain.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {

constexpr int kExperts = 8;

struct ExpertRun {
  // See semantics_config(). Adam's step does not depend on the size of a gradient, so a gradient of
  // rounding errors alone would move a parameter by lr in either direction; there is none here, and
  // a small lr keeps what differs below the tolerance.
  std::string kind = "adamw";
  int steps = 10;
  bool recompute = false;
  std::int64_t width = 6;
  at::Device device = at::Device(at::kCPU);
};

inline Config config_of(const ExpertRun& run) {
  Config config = semantics_config(run.kind, 0.0625);
  config.apply_flag("unit.dynamic_names=experts.*");
  config.apply_flag("persist.param_bytes=0");
  return config;
}

// Whether `rank` sends its rows through an expert in a step; in every fifth step nobody does.
inline bool is_routed(int step, int rank, int expert) {
  if (step % 5 == 4) {
    return false;
  }
  const unsigned mixed = static_cast<unsigned>((step * 31 + rank) * 131 + expert) * 2654435761U;
  return (mixed >> 13) % 3 == 0;
}

// Front, experts and back.
inline std::shared_ptr<AffineImpl> expert_layer(const ExpertRun& run, int seed) {
  const auto layer = affine(run.width, run.width, seed);
  const at::NoGradGuard no_grad;
  layer->weight.mul_(6.0 / static_cast<double>(run.width));  // results do not grow with the width
  return moved_to(run.device, layer);
}

// `make(name, seed)` gives a unit.
template <typename Make>
std::vector<Unit<AffineImpl>> expert_layers(const Make& make) {
  std::vector<Unit<AffineImpl>> layers;
  for (int i = 0; i < kExperts + 2; ++i) {
    layers.push_back(make(i < kExperts    ? "experts." + std::to_string(i)
                          : i == kExperts ? std::string("front")
                                          : std::string("back"),
                          i));
  }
  return layers;
}

// The loss of one rank in one step.
inline at::Tensor expert_loss(const ExpertRun& run, std::vector<Unit<AffineImpl>>& layers, int step,
                              int rank) {
  const at::Tensor x = layers[kExperts](input(4, run.width, step * 7 + rank).to(run.device));
  at::Tensor y = x;
  for (int expert = 0; expert < kExperts; ++expert) {
    if (is_routed(step, rank, expert)) {
      y = y + at::tanh(layers[static_cast<std::size_t>(expert)](x));
    }
  }
  return layers[kExperts + 1](y).pow(2).mean();
}

// What all ranks together train, by plain LibTorch.
inline std::vector<at::Tensor> train_plain_experts(const ExpertRun& run, int ranks) {
  std::vector<at::Tensor> params;
  auto layers = expert_layers([&](const std::string&, int seed) {
    const auto layer = expert_layer(run, seed);
    params.push_back(layer->weight);
    params.push_back(layer->bias);
    return Unit<AffineImpl>(layer);
  });
  const auto optimizer = torch_optimizer(run.kind, params, config_of(run).get_double("optim.lr"));
  for (int step = 0; step < run.steps; ++step) {
    at::Tensor loss = at::zeros({}, at::device(run.device));
    for (int rank = 0; rank < ranks; ++rank) {
      loss = loss + expert_loss(run, layers, step, rank);
    }
    optimizer->zero_grad(/*set_to_none=*/true);
    (loss / ranks).backward();
    optimizer->step();
  }
  return params;
}

struct ExpertOutcome {
  std::vector<StepResult> steps;
  std::vector<at::Tensor> params;  // in the order of the plain ones
};

// REQUIRES: the engine has config_of(run), and no unit.
inline ExpertOutcome train_experts(Engine& engine, const ExpertRun& run) {
  const int num_ranks = engine.runtime().num_ranks();
  auto layers = expert_layers([&](const std::string& name, int seed) {
    return engine.unit(name, expert_layer(run, seed), {.recompute = run.recompute});
  });
  ExpertOutcome outcome;
  for (int step = 0; step < run.steps; ++step) {
    outcome.steps.push_back(
        train_step(engine, expert_loss(run, layers, step, engine.runtime().rank())));
    const EngineStats stats = engine.take_stats();
    if (step % 5 == 4 && num_ranks > 1) {
      // Front and back, in forward and in backward, and nothing of the experts.
      const auto unit_bytes =
          engine.param(0).layout().full_bytes() + engine.param(1).layout().full_bytes();
      EXPECT_LE(stats.gathers.gathered_bytes, 4 * unit_bytes) << "step " << step;
    }
  }
  for (int id = 0; id < engine.num_params(); ++id) {
    outcome.params.push_back(engine.full_value(id));
  }
  return outcome;
}

inline void expect_experts_close(const std::vector<at::Tensor>& sharded,
                                 const std::vector<at::Tensor>& plain) {
  ASSERT_EQ(sharded.size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::allclose(sharded[i].cpu(), plain[i].cpu(), 1e-4, 1e-5)) << "parameter " << i;
  }
}

}  // namespace tessera::testing
