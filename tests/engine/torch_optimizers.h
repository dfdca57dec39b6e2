// Torch's own optimizers, and the options that make an engine's update the same.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tests/engine/small_modules.h"

namespace tessera::testing {

constexpr double kSemanticsLr = 0.125;

// "adamw", or "sgd" with momentum; both with weight decay, so that what must not move would.
inline Config semantics_config(const std::string& kind, double lr = kSemanticsLr) {
  Config config = quiet_config();
  config.set("optim.kind", kind);
  config.set("optim.lr", lr);
  config.set("optim.weight_decay", 0.25);
  if (kind == "sgd") {
    config.set("optim.momentum", 0.5);
  }
  return config;
}

inline std::unique_ptr<torch::optim::Optimizer> torch_optimizer(
    const std::string& kind, const std::vector<at::Tensor>& params, double lr = kSemanticsLr) {
  if (kind == "sgd") {
    return std::make_unique<torch::optim::SGD>(
        params, torch::optim::SGDOptions(lr).momentum(0.5).weight_decay(0.25));
  }
  return std::make_unique<torch::optim::AdamW>(params,
                                               torch::optim::AdamWOptions(lr).weight_decay(0.25));
}

}  // namespace tessera::testing
