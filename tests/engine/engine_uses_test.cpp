// Every way in which a model uses its weights gives the gradients of plain autograd.
#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

TEST(Functions, MayUseAWeightInTheLoss) {
  for (const bool recompute : {false, true}) {
    expect_plain_gradients([recompute](Builder& build) -> Built {
      auto unit = build.unit("unit", affine(5, 6, 1));
      const at::Tensor weight = unit->weight;
      auto loss = build.function(
          "loss", {weight},
          [weight](const at::Tensor& y) { return y.pow(2).mean() + weight.pow(2).sum() * 0.1; },
          recompute);
      return [=] { return loss(unit(input(4, 5, 0))); };
    });
  }
}

TEST(Functions, MayDeriveAWeightThatAnotherUnitUses) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto owner = build.unit("owner", affine(6, 6, 1));
    auto user = build.unit("user", affine(6, 6, 2));
    const at::Tensor weight = owner->weight;
    auto derive = build.function("derive", {weight}, [weight] { return weight.tanh() * 2; });
    return [=] { return user(at::linear(owner(input(4, 6, 0)), derive())).pow(2).mean(); };
  });
}

TEST(Functions, WithWeightsOfNoUnitAreRefused) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    EXPECT_SAYS("unit 'loss': the external tensor is no parameter",
                engine.function("loss", {at::ones({3})}, [](const at::Tensor& x) { return x; }));
  });
}

// The activation comes by capture, so the unit has no input that could tell of its end.
TEST(Functions, ThatCaptureAnActivationKeepTheirWeightsUntilItHasItsGradient) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1));
    auto frozen = build.unit("frozen", affine(6, 6, 2, false));
    auto last = build.unit("last", affine(6, 6, 3));
    auto captured = std::make_shared<at::Tensor>();
    const std::vector<at::Tensor> weights{frozen->weight, last->weight};
    auto head = build.function("head", weights, [captured, weights] {
      return at::linear(at::linear(*captured, weights[0]), weights[1]);
    });
    return [=] {
      *captured = first(input(4, 5, 0));
      return head().pow(2).mean();
    };
  });
}

// The outer unit's own gradient comes before the inner one's, which goes through a frozen weight.
struct FrozenBetweenImpl : torch::nn::Module {
  explicit FrozenBetweenImpl(Unit<AffineImpl> unit) : inner(std::move(unit)) {
    weight = register_parameter("weight", input(6, 6, 4));
    frozen = register_parameter("frozen", input(6, 6, 5), false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(at::linear(inner(x), frozen), weight);
  }
  Unit<AffineImpl> inner;
  at::Tensor weight;
  at::Tensor frozen;
};

TEST(Units, AroundUnitsStayUntilTheInnerOnesHaveTheirGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto inner = build.unit("inner", affine(5, 6, 1));
    auto outer = build.unit("outer", std::make_shared<FrozenBetweenImpl>(inner));
    return [=] { return outer(input(4, 5, 0)).pow(2).mean(); };
  });
}

// Hands its argument on, and makes something of its own only for the second result.
struct PassingImpl : torch::nn::Module {
  PassingImpl() { weight = register_parameter("weight", input(6, 6, 4)); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {x, at::linear(x, weight)};
  }
  at::Tensor weight;
};

TEST(Units, ThatHandTheirArgumentOnGivePlainGradients) {
  for (const bool uses_second : {false, true}) {
    expect_plain_gradients([=](Builder& build) -> Built {
      auto first = build.unit("first", affine(5, 6, 1));
      auto passing = build.unit("passing", std::make_shared<PassingImpl>());
      return [=] {
        const auto [same, made] = passing(first(input(4, 5, 0)));
        return (uses_second ? same * made : same).pow(2).mean();
      };
    });
  }
}

TEST(Units, HaveNoBackwardWhereTheyOnlyHandTheirArgumentOn) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto passing = engine.unit("passing", std::make_shared<PassingImpl>());
    engine.backward(std::get<0>(passing(first(input(4, 5, 0)))).pow(2).mean());
    EXPECT_EQ(engine.take_stats().gathers.num_uses, 3U);
    engine.step();
  });
}

// One weight under two names, used twice.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    weight = register_parameter("weight", input(6, 6, 1));
    register_parameter("again", weight);
    unused = register_parameter("unused", input(2, 2, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(at::gelu(at::linear(x, weight)), weight);
  }
  at::Tensor weight;
  at::Tensor unused;
};

TEST(Weights, UsedTwiceInAUnitAndKnownTwiceGetOneGradient) {
  for (const bool recompute : {false, true}) {
    expect_plain_gradients([recompute](Builder& build) -> Built {
      auto unit = build.unit("unit", std::make_shared<TwiceImpl>(), recompute);
      if (build.engine != nullptr) {
        build.engine->add_external(unit, unit->weight);
      }
      return [=] { return unit(input(4, 6, 0)).pow(2).mean(); };
    });
  }
}

TEST(Weights, WithoutElementsTrainNothingAndHinderNothing) {
  struct EmptyImpl : torch::nn::Module {
    EmptyImpl() {
      empty = register_parameter("empty", at::empty({0, 5}));
      weight = register_parameter("weight", input(3, 5, 1));
    }
    at::Tensor forward(const at::Tensor& x) {
      return at::linear(x, at::cat({empty, weight})) + empty.sum();
    }
    at::Tensor empty;
    at::Tensor weight;
  };
  expect_plain_gradients([](Builder& build) -> Built {
    auto unit = build.unit("unit", std::make_shared<EmptyImpl>());
    return [=] { return unit(input(4, 5, 0)).pow(2).mean(); };
  });
}

TEST(Forwards, SeveralBeforeOneBackwardGivePlainGradients) {
  for (const bool recompute : {false, true}) {
    expect_plain_gradients([recompute](Builder& build) -> Built {
      auto first = build.unit("first", affine(5, 6, 1));
      auto second = build.unit("second", affine(6, 3, 2), recompute);
      return [=] {
        const at::Tensor a = second(at::gelu(first(input(4, 5, 0))));
        const at::Tensor b = second(at::gelu(first(input(4, 5, 1))));
        return (a * b).mean() + a.pow(2).mean();
      };
    });
  }
}

at::Tensor two_layers(const Unit<AffineImpl>& first, const Unit<AffineImpl>& second, int seed) {
  return second(at::gelu(first(input(4, 5, seed))));
}

// hits and misses of one phase tell which phase it was.
std::uint64_t num_needed(const coordinator::GatherCounts& counts) {
  return counts.hits + counts.misses;
}

TEST(Phases, FollowGradModeAndRecomputedUnitsTrain) {
  Config config = quiet_config();
  config.apply_flag("live.limit_bytes=0");
  config.apply_flag("persist.param_bytes=0");
  with_engines(2, config, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 3, 2), {.recompute = true});
    for (int step = 0; step < 2; ++step) {
      {
        const at::NoGradGuard no_grad;
        two_layers(first, second, 0);
      }
      const coordinator::CoordinatorStats evaluated = engine.take_stats().gathers;
      EXPECT_EQ(num_needed(evaluated.inference), 4U);
      EXPECT_EQ(num_needed(evaluated.forward) + num_needed(evaluated.backward), 0U);
      engine.backward(two_layers(first, second, 0).mean());
      const coordinator::CoordinatorStats trained = engine.take_stats().gathers;
      EXPECT_EQ(num_needed(trained.inference), 0U);
      EXPECT_EQ(num_needed(trained.forward), 4U);
      EXPECT_GT(num_needed(trained.backward), 0U);
      engine.step();
      engine.take_stats();
    }
  });
}

// Uses of a step that had to wait for a gather on demand.
std::uint64_t num_missed(Engine& engine) {
  const coordinator::CoordinatorStats stats = engine.take_stats().gathers;
  return stats.forward.missed_uses + stats.backward.missed_uses + stats.inference.missed_uses;
}

struct DroppingImpl : AffineImpl {
  DroppingImpl() : AffineImpl(5, 6, 1) {}
  at::Tensor forward(const at::Tensor& x) { return at::dropout(AffineImpl::forward(x), 0.5, true); }
};

// With other numbers in its second forward, a unit's weights would get gradients of another mask.
TEST(Recomputation, DrawsTheRandomNumbersOfTheFirstForwardAgain) {
  std::vector<at::Tensor> trained;
  at::Tensor next_draw;
  for (const bool recompute : {false, true}) {
    with_engines(1, [&](Engine& engine, comm::Group&) {
      auto unit = engine.unit("unit", std::make_shared<DroppingImpl>(), {.recompute = recompute});
      at::manual_seed(7);
      const at::Tensor loss = unit(input(4, 5, 0)).pow(2).mean();
      const at::Tensor drawn = at::rand({3});  // between forward and backward, by somebody else
      train_step(engine, loss);
      trained.push_back(engine.full_value(0));
      const at::Tensor after = at::cat({drawn, at::rand({3})});
      EXPECT_TRUE(!recompute || at::equal(after, next_draw)) << "recomputing moved the generator";
      next_draw = after;
    });
  }
  EXPECT_TRUE(at::equal(trained[0], trained[1]));
}

TEST(Prefetch, HitsThroughoutInStepsEvaluationsAndSeveralForwards) {
  Config config = quiet_config();
  config.apply_flag("persist.param_bytes=0");
  config.set("optim.lr", 0.01);
  with_engines(2, config, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 3, 2));
    for (int step = 0; step < 8; ++step) {
      train_step(engine, (two_layers(first, second, 0) * two_layers(first, second, 1)).mean());
      {
        const at::NoGradGuard no_grad;
        two_layers(first, second, 2);
      }
      const std::uint64_t missed = num_missed(engine);
      if (step >= 2) {
        EXPECT_EQ(missed, 0U) << "step " << step;
      }
    }
  });
}

TEST(Prefetch, OfTwoAlternatingBranchesMissesOnceAtMost) {
  Config config = quiet_config();
  config.apply_flag("persist.param_bytes=0");
  config.set("optim.lr", 0.01);
  with_engines(2, config, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto left = engine.unit("left", affine(6, 6, 2));
    auto right = engine.unit("right", affine(6, 6, 3));
    auto last = engine.unit("last", affine(6, 3, 4));
    for (int step = 0; step < 10; ++step) {
      const at::Tensor x = first(input(4, 5, step));
      train_step(engine, last(at::gelu(step % 2 == 0 ? left(x) : right(x))).pow(2).mean());
      const std::uint64_t missed = num_missed(engine);
      if (step >= 4) {
        EXPECT_LE(missed, 1U) << "step " << step;
      }
    }
  });
}

TEST(ResidentScope, GathersOnceAndGivesTheSameValues) {
  for (const int ranks : {1, 2, 3}) {
    with_engines(ranks, [&](Engine& engine, comm::Group&) {
      auto first = engine.unit("first", affine(5, 6, 1));
      auto second = engine.unit("second", affine(6, 3, 2));
      for (int step = 0; step < 3; ++step) {
        train_step(engine, two_layers(first, second, step).pow(2).mean());
        const at::NoGradGuard no_grad;
        const at::Tensor expected = two_layers(first, second, 9);
        engine.take_stats();
        {
          auto scope = engine.resident();
          EXPECT_TRUE(scope.is_resident());
          const std::uint64_t before = engine.take_stats().gathers.num_gathers;
          for (int pass = 0; pass < 5; ++pass) {
            EXPECT_TRUE(at::equal(two_layers(first, second, 9), expected));
          }
          EXPECT_EQ(engine.take_stats().gathers.num_gathers, 0U) << before;
        }
        EXPECT_ANY_THROW(first->weight.sum());
      }
    });
  }
}

TEST(ResidentScope, ThatDoesNotFitRunsAsUsual) {
  Config config = quiet_config();
  config.apply_flag("live.limit_bytes=64");
  config.apply_flag("persist.param_bytes=0");
  with_engines(2, config, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 3, 2));
    const at::NoGradGuard no_grad;
    auto scope = engine.resident();
    EXPECT_FALSE(scope.is_resident());
    const at::Tensor y = two_layers(first, second, 0);
    EXPECT_TRUE(at::allclose(
        y, affine(6, 3, 2)->forward(at::gelu(affine(5, 6, 1)->forward(input(4, 5, 0))))));
  });
}

TEST(ResidentScope, IsNoPlaceForTraining) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 3, 2));
    engine.backward(two_layers(first, second, 0).mean());
    {
      auto scope = engine.resident();
      EXPECT_SAYS("step() inside a resident scope", engine.step());
      EXPECT_SAYS("backward() inside a resident scope",
                  engine.backward(two_layers(first, second, 0).mean()));
      EXPECT_SAYS("inside another resident scope", engine.resident().close());
      EXPECT_SAYS("inside a resident scope", engine.gathered({first->weight}, 0).close());
    }
    engine.step();
  });
}

TEST(Engines, TwoInOneProcessTrainOneGraphTogether) {
  for (const int ranks : {1, 2}) {
    with_engines(ranks, [](Engine& engine, comm::Group&) {
      Engine other(engine.runtime());
      auto a = engine.unit("unit", affine(5, 6, 1));
      auto b = other.unit("unit", affine(6, 3, 2));
      const auto plain_a = affine(5, 6, 1);
      const auto plain_b = affine(6, 3, 2);
      for (int step = 0; step < 3; ++step) {
        // The second engine takes the first one's output as data, and hands its gradient back.
        const at::Tensor middle = a(input(4, 5, step));
        const at::Tensor leaf = middle.detach().set_requires_grad(true);
        const at::Tensor loss = b(at::gelu(leaf)).pow(2).mean();
        other.backward(loss);
        engine.backward((middle * leaf.grad()).sum());
        other.step();
        engine.step();
        const at::Tensor expected =
            plain_b->forward(at::gelu(plain_a->forward(input(4, 5, step)))).pow(2).mean();
        expected.backward();
        const at::NoGradGuard no_grad;
        for (const auto& module : {plain_a, plain_b}) {
          for (at::Tensor& param : module->parameters()) {
            param.sub_(param.grad());
            param.mutable_grad().reset();
          }
        }
      }
      EXPECT_TRUE(at::allclose(engine.full_value(0), plain_a->weight, 1e-4, 1e-5));
      EXPECT_TRUE(at::allclose(other.full_value(0), plain_b->weight, 1e-4, 1e-5));
    });
  }
}

}  // namespace
}  // namespace tessera::testing
