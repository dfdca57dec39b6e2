// Parameters that are frozen and unfrozen between steps, against plain LibTorch.
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

// Whether the first layer is trained in step `step`.
bool is_trained(int step) { return step != 0 && step != 3 && step != 4; }

at::Tensor sample(int step) { return input(4, 5, step); }

std::vector<at::Tensor> train_plain() {
  const auto first = affine(5, 6, 1, false);
  const auto second = affine(6, 2, 2);
  std::vector<at::Tensor> params{first->weight, first->bias, second->weight, second->bias};
  torch::optim::AdamW optimizer(params, torch::optim::AdamWOptions(0.05).weight_decay(0));
  for (int step = 0; step < 7; ++step) {
    first->weight.set_requires_grad(is_trained(step));
    optimizer.zero_grad();
    second->forward(at::gelu(first->forward(sample(step)))).pow(2).mean().backward();
    optimizer.step();
  }
  return params;
}

TEST(Freezing, AndUnfreezingTrainsAsPlainTorchDoes) {
  const std::vector<at::Tensor> expected = train_plain();
  for (const int ranks : {1, 2, 3}) {
    for (const bool by_torch : {false, true}) {
      with_engines(ranks, adam_config(0.05), [&](Engine& engine, comm::Group&) {
        auto first = engine.unit("first", affine(5, 6, 1, false));
        auto second = engine.unit("second", affine(6, 2, 2));
        for (int step = 0; step < 7; ++step) {
          if (by_torch) {
            first->weight.set_requires_grad(is_trained(step));
          } else {
            engine.set_trainable(first->weight, is_trained(step));
          }
          train_step(engine, second(at::gelu(first(sample(step)))).pow(2).mean());
        }
        for (int id = 0; id < engine.num_params(); ++id) {
          EXPECT_TRUE(at::allclose(engine.full_value(id), expected[static_cast<std::size_t>(id)],
                                   1e-5, 1e-6))
              << engine.param(id).name() << ", " << ranks << " ranks";
        }
        EXPECT_FALSE(at::equal(engine.full_value(0), affine(5, 6, 1)->weight));
        EXPECT_TRUE(at::equal(engine.full_value(1), affine(5, 6, 1)->bias));
      });
    }
  }
}

TEST(Freezing, InTheMiddleOfAStepIsRefusedByName) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    engine.backward(unit(input(4, 5, 0)).sum());
    EXPECT_SAYS("parameter 'unit.bias' is frozen in the middle of a step",
                engine.set_trainable(unit->bias, false));
    unit->weight.set_requires_grad(false);
    EXPECT_SAYS("parameter 'unit.weight' is frozen in the middle of a step", unit(input(4, 5, 0)));
    engine.zero_grad();
    train_step(engine, unit(input(4, 5, 0)).sum());
    EXPECT_TRUE(at::equal(engine.full_value(0), affine(5, 6, 1)->weight));
  });
}

TEST(Freezing, OfWhatIsNoParameterIsRefused) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    EXPECT_SAYS("no parameter of this engine", engine.set_trainable(at::ones({3}), false));
  });
}

}  // namespace
}  // namespace tessera::testing
