// One step of sharded training against plain autograd, for models of any shape.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/small_modules.h"

namespace tessera::testing {

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

// `build` makes units and gives the loss; it runs once with an engine and once plain.
using Built = std::function<at::Tensor()>;
using Build = std::function<Built(Engine*, std::vector<at::Tensor>*)>;

template <typename Module>
Unit<Module> unit_of(Engine* engine, const std::string& name, const std::shared_ptr<Module>& module,
                     std::vector<at::Tensor>* params, bool recompute = false) {
  if (params != nullptr) {
    for (const at::Tensor& param : module->parameters()) {
      params->push_back(param);
    }
  }
  if (engine == nullptr) {
    return Unit<Module>(module, recompute);
  }
  UnitOptions options;
  options.recompute = recompute;
  return engine->unit(name, module, options);
}

// Gradients of 1, 2 and 4 ranks against plain autograd; all ranks have the same data, so the mean
// over ranks is the gradient of one, and sums of two or four equal numbers are exact.
inline void expect_plain_gradients(const Build& build) {
  std::vector<at::Tensor> plain_params;
  const Built plain = build(nullptr, &plain_params);
  plain().backward();
  for (const int ranks : {1, 2, 4}) {
    with_engines(ranks, [&](Engine& engine, comm::Group&) {
      const Built sharded = build(&engine, nullptr);
      const Taken taken = values_of(engine);
      engine.backward(sharded());
      engine.step();
      const std::vector<at::Tensor> gradients = taken.gradient(engine);
      std::size_t next = 0;
      for (const at::Tensor& param : plain_params) {
        const at::Tensor expected = param.grad().defined() ? param.grad() : at::zeros_like(param);
        // w - (w - g) loses what is below the last place of w.
        EXPECT_TRUE(at::allclose(gradients[next], expected, 1e-5, 1e-6))
            << "parameter " << next << ", " << ranks << " ranks";
        ++next;
      }
      // A second step on the recorded trace works as the first did.
      engine.backward(sharded());
      engine.step();
    });
  }
}

}  // namespace tessera::testing
