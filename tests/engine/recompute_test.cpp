// Recomputed units give the gradients of units that are not, whatever they use.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <torch/nn/modules/batchnorm.h>

#include "tests/engine/messages.h"
#include "tests/engine/plain_gradients.h"
#include "tests/engine/small_modules.h"

namespace tessera::testing {
namespace {

// The unit, or a plain call of the same module: recomputation is what is judged, so the plain model
// has none.
template <typename Module>
Unit<Module> recomputed(Engine* engine, const std::string& name,
                        const std::shared_ptr<Module>& module, std::vector<at::Tensor>* params) {
  return unit_of(engine, name, module, params, /*recompute=*/engine != nullptr);
}

template <typename Callable>
auto recomputed_function(Engine* engine, const std::string& name, const Callable& callable) {
  using Function = FunctionModule<Callable>;
  if (engine == nullptr) {
    return Unit<Function>(std::make_shared<Function>(callable, std::vector<at::Tensor>{}));
  }
  UnitOptions options;
  options.recompute = true;
  return engine->function(name, {}, callable, options);
}

TEST(Recomputed, SegmentsTrainTheUnitsThatRunInside) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto first = unit_of(engine, "first", affine(6, 6, 1), params);
    auto second = unit_of(engine, "second", affine(6, 6, 2), params);
    auto third = unit_of(engine, "third", affine(6, 3, 3), params);
    auto segment = recomputed_function(engine, "segment", [=](const at::Tensor& h) {
      return second(at::gelu(first(h))) + first(at::tanh(h));
    });
    return [=] { return third(segment(segment(input(4, 6, 0)))).pow(2).mean(); };
  });
}

TEST(Recomputed, SegmentsMayBeInsideSegments) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto first = unit_of(engine, "first", affine(6, 6, 1), params);
    auto second = recomputed(engine, "second", affine(6, 6, 2), params);
    auto inner = recomputed_function(
        engine, "inner", [=](const at::Tensor& h) { return second(at::gelu(first(h))); });
    auto outer = recomputed_function(
        engine, "outer", [=](const at::Tensor& h) { return inner(h * 2) + second(inner(h)); });
    return [=] { return outer(first(input(4, 6, 0))).pow(2).mean(); };
  });
}

// Uses another unit that is no registered child.
struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(Unit<AffineImpl> unit) : inner(std::move(unit)) {
    scale = register_parameter("scale", at::full({6}, 0.7));
  }
  at::Tensor forward(const at::Tensor& x) { return at::gelu(inner(x * scale)) * scale; }
  Unit<AffineImpl> inner;
  at::Tensor scale;
};

TEST(Recomputed, ModulesTrainUnitsThatAreMembersAndNotRegistered) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto inner = unit_of(engine, "inner", affine(6, 6, 1), params);
    auto holder = recomputed(engine, "holder", std::make_shared<HolderImpl>(inner), params);
    return [=] { return holder(input(4, 6, 0)).pow(2).mean(); };
  });
}

struct Pair {
  at::Tensor left;
  at::Tensor right;
};

// Its tensors come every way but as plain arguments, and one leaves without being returned.
struct ManyWaysImpl : torch::nn::Module {
  ManyWaysImpl() { weight = register_parameter("weight", input(6, 6, 3)); }
  at::Tensor forward(const std::map<std::string, at::Tensor>& named, const Pair& pair) {
    const at::Tensor h = at::linear(named.at("a") * pair.left + named.at("b"), weight);
    kept = at::gelu(h).pow(2).mean();
    return h * member + pair.right;
  }
  at::Tensor weight;
  at::Tensor member;
  at::Tensor kept;
};

TEST(Recomputed, TensorsGetTheirGradientHoweverTheyCome) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto first = unit_of(engine, "first", affine(5, 6, 1), params);
    auto ways = recomputed(engine, "ways", std::make_shared<ManyWaysImpl>(), params);
    return [=] {
      const at::Tensor x = first(input(4, 5, 0));
      ways->member = at::sin(x);
      const std::map<std::string, at::Tensor> named{{"a", x * 2}, {"b", at::tanh(x)}};
      const at::Tensor y = ways(named, Pair{at::cos(x), x});
      return y.pow(2).mean() + 3 * ways->kept;
    };
  });
}

TEST(Recomputed, ForwardsHaveTheAutocastOfTheFirst) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto first = recomputed(engine, "first", affine(5, 6, 1), params);
    auto second = recomputed(engine, "second", affine(6, 3, 2), params);
    return [=] {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::ScalarType before = at::autocast::get_autocast_dtype(at::kCPU);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      const at::Tensor y = second(at::gelu(first(input(4, 5, 0))));
      at::autocast::set_autocast_dtype(at::kCPU, before);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      return y.to(at::kFloat).pow(2).mean();
    };
  });
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() : norm(torch::nn::BatchNormOptions(6)) {
    register_module("norm", norm);
    weight = register_parameter("weight", input(6, 6, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(at::linear(x, weight)); }
  torch::nn::BatchNorm1d norm;
  at::Tensor weight;
};

TEST(Recomputed, BuffersAdvanceOnce) {
  for (const bool in_segment : {false, true}) {
    auto plain = std::make_shared<NormedImpl>();
    auto sharded = std::make_shared<NormedImpl>();
    with_engines(1, [&](Engine& engine, comm::Group&) {
      UnitOptions options;
      options.recompute = !in_segment;
      auto unit = engine.unit("unit", sharded, options);
      auto segment =
          recomputed_function(&engine, "segment", [=](const at::Tensor& x) { return unit(x); });
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = input(4, 6, step);
        plain->forward(x).pow(2).mean().backward();
        const at::Tensor y = in_segment ? segment(x) : unit(x);
        EXPECT_TRUE(at::equal(sharded->norm->running_mean, plain->norm->running_mean));
        engine.backward(y.pow(2).mean());
        engine.zero_grad();
        EXPECT_TRUE(at::equal(sharded->norm->running_mean, plain->norm->running_mean)) << step;
        EXPECT_TRUE(at::equal(sharded->norm->running_var, plain->norm->running_var)) << step;
        EXPECT_EQ(sharded->norm->num_batches_tracked.item<int>(), step + 1);
      }
    });
  }
}

TEST(Recomputed, ForwardsThatReachOtherTensorsAreRefusedByName) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(6, 6, 1));
    auto second = engine.unit("second", affine(6, 6, 2));
    bool takes_first = true;
    auto segment = recomputed_function(&engine, "segment", [&](const at::Tensor& h) {
      return takes_first ? first(h) : second(h);
    });
    const at::Tensor y = segment(input(4, 6, 0));
    takes_first = false;
    EXPECT_SAYS("recomputed unit 'segment': its forward used parameter 'first.",
                engine.backward(y.sum()));
  });
}

TEST(Recomputed, UnitsThatChangeTheirInputAreRefusedByName) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(6, 6, 1));
    auto changes = recomputed_function(&engine, "changes", [=](at::Tensor x) {
      x.mul_(2);
      return unit(x);
    });
    auto fine = recomputed_function(&engine, "fine", [=](const at::Tensor& x) { return unit(x); });
    EXPECT_SAYS("recomputed unit 'changes' changes its input in place", changes(input(4, 6, 0)));
    const at::Tensor x = input(4, 6, 0);
    const at::Tensor y = fine(x);
    x.mul_(2);
    EXPECT_SAYS("recomputed unit 'fine': its input was changed in place", engine.backward(y.sum()));
  });
}

TEST(Recomputed, GraphsFromBeforeAnUpdateAreRefusedByName) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    UnitOptions options;
    options.recompute = true;
    auto unit = engine.unit("unit", affine(6, 6, 1), options);
    const at::Tensor first = unit(input(4, 6, 0)).pow(2).mean();
    const at::Tensor second = unit(input(4, 6, 1)).pow(2).mean();
    engine.backward(first);
    engine.step();
    EXPECT_SAYS("recomputed unit 'unit': its parameters were updated by step() after this forward",
                engine.backward(second));
  });
}

TEST(Recomputed, ALeafOfTheForwardsOwnIsNobodyElses) {
  expect_plain_gradients([](Engine* engine, std::vector<at::Tensor>* params) -> Built {
    auto unit = unit_of(engine, "unit", affine(6, 6, 1), params);
    auto segment = recomputed_function(engine, "segment", [=](const at::Tensor& h) {
      const at::Tensor own = at::ones({6}).set_requires_grad(true);
      return unit(h * own);
    });
    return [=] { return segment(input(4, 6, 0)).pow(2).mean(); };
  });
}

TEST(Results, OfATypeInWhichTensorsCannotBeSeenAreRefusedByName) {
  struct OpaqueImpl : torch::nn::Module {
    OpaqueImpl() { weight = register_parameter("weight", input(6, 6, 3)); }
    Pair forward(const at::Tensor& x) { return {at::linear(x, weight), x}; }
    at::Tensor weight;
  };
  for (const bool recompute : {false, true}) {
    with_engines(1, [&](Engine& engine, comm::Group&) {
      UnitOptions options;
      options.recompute = recompute;
      auto unit = engine.unit("unit", std::make_shared<OpaqueImpl>(), options);
      EXPECT_SAYS("unit 'unit' returns", unit(input(4, 6, 0)));
      const at::NoGradGuard no_grad;
      EXPECT_EQ(unit(input(4, 6, 0)).left.size(0), 4);
    });
  }
}

}  // namespace
}  // namespace tessera::testing
