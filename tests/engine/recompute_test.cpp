// Recomputed units give the gradients of units that are not, whatever they use.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <torch/nn/modules/batchnorm.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

TEST(Recomputed, SegmentsTrainTheUnitsThatRunInside) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(6, 6, 1));
    auto second = build.unit("second", affine(6, 6, 2));
    auto third = build.unit("third", affine(6, 3, 3));
    auto segment = build.function(
        "segment", {},
        [=](const at::Tensor& h) { return second(at::gelu(first(h))) + first(at::tanh(h)); },
        build.recomputes());
    return [=] { return third(segment(segment(input(4, 6, 0)))).pow(2).mean(); };
  });
}

TEST(Recomputed, SegmentsMayBeInsideSegments) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(6, 6, 1));
    auto second = build.unit("second", affine(6, 6, 2), build.recomputes());
    auto inner = build.function(
        "inner", {}, [=](const at::Tensor& h) { return second(at::gelu(first(h))); },
        build.recomputes());
    auto outer = build.function(
        "outer", {}, [=](const at::Tensor& h) { return inner(h * 2) + second(inner(h)); },
        build.recomputes());
    return [=] { return outer(first(input(4, 6, 0))).pow(2).mean(); };
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
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1));
    auto ways = build.unit("ways", std::make_shared<ManyWaysImpl>(), build.recomputes());
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
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1), build.recomputes());
    auto second = build.unit("second", affine(6, 3, 2), build.recomputes());
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
      auto unit = engine.unit("unit", sharded, {.recompute = !in_segment});
      auto segment = engine.function("segment", {}, [=](const at::Tensor& x) { return unit(x); },
                                     {.recompute = true});
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
    auto segment = engine.function(
        "segment", {}, [&](const at::Tensor& h) { return takes_first ? first(h) : second(h); },
        {.recompute = true});
    const at::Tensor y = segment(input(4, 6, 0));
    takes_first = false;
    EXPECT_SAYS("recomputed unit 'segment': its forward used parameter 'first.",
                engine.backward(y.sum()));
  });
}

TEST(Recomputed, UnitsThatChangeTheirInputAreRefusedByName) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(6, 6, 1));
    auto changes = engine.function("changes", {},
                                   [=](at::Tensor x) {
                                     x.mul_(2);
                                     return unit(x);
                                   },
                                   {.recompute = true});
    auto fine = engine.function("fine", {}, [=](const at::Tensor& x) { return unit(x); },
                                {.recompute = true});
    EXPECT_SAYS("recomputed unit 'changes' changes its input in place", changes(input(4, 6, 0)));
    const at::Tensor x = input(4, 6, 0);
    const at::Tensor y = fine(x);
    x.mul_(2);
    EXPECT_SAYS("recomputed unit 'fine': its input was changed in place", engine.backward(y.sum()));
  });
}

TEST(Recomputed, GraphsFromBeforeAnUpdateAreRefusedByName) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(6, 6, 1), {.recompute = true});
    const at::Tensor first = unit(input(4, 6, 0)).pow(2).mean();
    const at::Tensor second = unit(input(4, 6, 1)).pow(2).mean();
    train_step(engine, first);
    EXPECT_SAYS("recomputed unit 'unit': its parameters were updated by step() after this forward",
                engine.backward(second));
  });
}

TEST(Recomputed, ALeafOfTheForwardsOwnIsNobodyElses) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto unit = build.unit("unit", affine(6, 6, 1));
    auto segment = build.function(
        "segment", {},
        [=](const at::Tensor& h) {
          const at::Tensor own = at::ones({6}).set_requires_grad(true);
          return unit(h * own);
        },
        build.recomputes());
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
      auto unit = engine.unit("unit", std::make_shared<OpaqueImpl>(), {.recompute = recompute});
      EXPECT_SAYS("unit 'unit' returns", unit(input(4, 6, 0)));
      const at::NoGradGuard no_grad;
      EXPECT_EQ(unit(input(4, 6, 0)).left.size(0), 4);
    });
  }
}

}  // namespace
}  // namespace tessera::testing
