// What tests of the engine share: modules small enough to reason about, engines with ranks as
// threads, one step, one step against plain autograd, and what an exception says.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

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

inline std::shared_ptr<AffineImpl> moved_to(at::Device device,
                                            const std::shared_ptr<AffineImpl>& module) {
  module->to(device);
  module->weight = module->named_parameters()["weight"];
  module->bias = module->named_parameters()["bias"];
  return module;
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

inline StepResult train_step(Engine& engine, const at::Tensor& loss, double weight = 1) {
  engine.backward(loss, weight);
  return engine.step();
}

// What each rank throws, or null; a lost rank is noticed soon.
inline std::vector<std::exception_ptr> failures_of(
    int ranks, const Config& config, const std::function<void(Engine&, comm::Group&)>& body) {
  comm::ThreadWorldOptions world;
  world.num_ranks = ranks;
  comm::GroupOptions options;
  options.heartbeat = std::chrono::milliseconds(20);
  return comm::run_ranks_collecting(world, options, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    Engine engine(runtime);
    body(engine, group);
  });
}

// A step of plain sgd.
inline void descend(const std::vector<std::shared_ptr<AffineImpl>>& modules, double lr) {
  const at::NoGradGuard no_grad;
  for (const auto& module : modules) {
    for (at::Tensor& param : module->parameters()) {
      param.sub_(param.grad(), lr);
      param.mutable_grad().reset();
    }
  }
}

// One rank changes whole parameters.
inline void change(Engine& engine, const std::vector<at::Tensor>& params, int rank,
                   const std::function<void()>& edit) {
  GatheredScope scope = engine.gathered(params, rank);
  if (engine.group().rank() == rank) {
    const at::NoGradGuard no_grad;
    edit();
  }
  scope.close();
}

template <typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no exception";
}

// Torch's own optimizers, and the options that make an engine's update the same.
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

// What one step of sgd with lr 1 subtracts is the gradient.
struct Taken {
  std::vector<at::Tensor> before;
  std::vector<at::Tensor> gradient(Engine& engine) const {
    std::vector<at::Tensor> result;
    for (int id = 0; id < engine.num_params(); ++id) {
      result.push_back(before[static_cast<std::size_t>(id)] - engine.full_value(id));
    }
    return result;
  }
};

inline Taken values_of(Engine& engine) {
  Taken taken;
  for (int id = 0; id < engine.num_params(); ++id) {
    taken.before.push_back(engine.full_value(id));
  }
  return taken;
}

// Makes units with an engine, or plain ones whose parameters it keeps.
struct Builder {
  template <typename Module>
  Unit<Module> unit(const std::string& name, const std::shared_ptr<Module>& module,
                    bool recompute = false) {
    if (engine != nullptr) {
      return engine->unit(name, module, {.recompute = recompute});
    }
    for (const at::Tensor& param : module->parameters()) {
      if (std::none_of(params.begin(), params.end(),
                       [&](const at::Tensor& known) { return known.is_same(param); })) {
        params.push_back(param);
      }
    }
    return Unit<Module>(module, recompute);
  }
  template <typename Callable>
  Unit<FunctionModule<Callable>> function(const std::string& name,
                                          const std::vector<at::Tensor>& weights, Callable callable,
                                          bool recompute = false) {
    if (engine != nullptr) {
      return engine->function(name, weights, std::move(callable), {.recompute = recompute});
    }
    return Unit<FunctionModule<Callable>>(
        std::make_shared<FunctionModule<Callable>>(std::move(callable), weights), recompute);
  }
  // Recomputation is what is judged, so the plain model has none.
  bool recomputes() const { return engine != nullptr; }

  Engine* engine = nullptr;  // null: plain
  std::vector<at::Tensor> params;
};

// Makes units and gives the loss; it runs once with an engine and once plain.
using Built = std::function<at::Tensor()>;
using Build = std::function<Built(Builder&)>;

// Gradients of 1, 2 and 4 ranks against plain autograd; all ranks have the same data, so the mean
// over ranks is the gradient of one, and sums of two or four equal numbers are exact.
inline void expect_plain_gradients(const Build& build) {
  Builder plain;
  build(plain)().backward();
  for (const int ranks : {1, 2, 4}) {
    with_engines(ranks, [&](Engine& engine, comm::Group&) {
      Builder builder{&engine, {}};
      const Built sharded = build(builder);
      const Taken taken = values_of(engine);
      train_step(engine, sharded());
      const std::vector<at::Tensor> gradients = taken.gradient(engine);
      std::size_t next = 0;
      for (const at::Tensor& param : plain.params) {
        const at::Tensor expected = param.grad().defined() ? param.grad() : at::zeros_like(param);
        // w - (w - g) loses what is below the last place of w.
        EXPECT_TRUE(at::allclose(gradients[next], expected, 1e-5, 1e-6))
            << "parameter " << next << ", " << ranks << " ranks";
        ++next;
      }
      // A second step on the recorded trace works as the first did.
      train_step(engine, sharded());
    });
  }
}

}  // namespace tessera::testing

#define EXPECT_SAYS(text, ...)                                                     \
  do {                                                                             \
    const std::string said = ::tessera::testing::message_of([&] { __VA_ARGS__; }); \
    EXPECT_NE(said.find(text), std::string::npos) << said;                         \
  } while (false)
