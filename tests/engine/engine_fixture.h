// Modules small enough to reason about, and an engine for one rank's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "tessera/core/config.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"
#include "testing/thread_backend.h"

namespace tessera::testing {

// y = x W^T + b, with values that depend on the name's seed alone.
struct AffineImpl : torch::nn::Module {
  AffineImpl(std::int64_t in, std::int64_t out, int seed, bool trainable = true) {
    const auto values = [&](at::IntArrayRef shape, int shift) {
      std::int64_t numel = 1;
      for (const std::int64_t size : shape) {
        numel *= size;
      }
      return (at::arange(numel, at::kFloat) * 0.37 + (seed + shift)).sin().reshape(shape) * 0.5;
    };
    weight = register_parameter("weight", values({out, in}, 0), trainable);
    bias = register_parameter("bias", values({out}, 3), trainable);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight;
  at::Tensor bias;
};

inline std::shared_ptr<AffineImpl> affine(std::int64_t in, std::int64_t out, int seed,
                                          bool trainable = true) {
  return std::make_shared<AffineImpl>(in, out, seed, trainable);
}

inline Config quiet_config() {
  Config config;
  config.set("log.level", std::string("error"));
  config.set("grad.clip_norm", 0.0);
  config.set("optim.kind", std::string("sgd"));
  config.set("optim.weight_decay", 0.0);
  config.set("optim.lr", 1.0);
  return config;
}

inline Config adam_config(double lr) {
  Config config = quiet_config();
  config.set("optim.kind", std::string("adamw"));
  config.set("optim.lr", lr);
  return config;
}

// One engine per rank; with sgd, lr 1 and no clipping a step subtracts the gradient.
inline void with_engines(int ranks, const Config& config,
                         const std::function<void(Engine&, comm::Group&)>& body) {
  comm::run_ranks(ranks, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    Engine engine(runtime);
    body(engine, group);
  });
}
inline void with_engines(int ranks, const std::function<void(Engine&, comm::Group&)>& body) {
  with_engines(ranks, quiet_config(), body);
}

inline int id_of(Engine& engine, const std::string& name) {
  return engine.params().find(name)->id();
}

inline at::Tensor input(std::int64_t rows, std::int64_t columns, int seed) {
  return (at::arange(rows * columns, at::kFloat) * 0.61 + seed).cos().reshape({rows, columns});
}

}  // namespace tessera::testing
