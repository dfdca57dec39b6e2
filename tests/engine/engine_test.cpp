// How units are watched: every shape of graph gives the gradients of plain autograd.
#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

TEST(Units, InARowGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 7, 1));
    auto second = build.unit("second", affine(7, 3, 2));
    return [=] { return second(at::gelu(first(input(4, 5, 0)))).pow(2).mean(); };
  });
}

TEST(Units, UsedTwiceGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto unit = build.unit("unit", affine(6, 6, 1));
    return [=] {
      const at::Tensor x = unit(input(4, 6, 0));
      return (unit(at::tanh(x)) + unit(x * 2)).pow(2).mean();
    };
  });
}

TEST(Units, ThatAreFrozenInTheMiddlePassGradientsOn) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1));
    auto frozen = build.unit("frozen", affine(6, 6, 2, false));
    auto last = build.unit("last", affine(6, 2, 3));
    return [=] { return last(at::gelu(frozen(first(input(4, 5, 0))))).pow(2).mean(); };
  });
}

TEST(Units, InParallelBranchesGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto left = build.unit("left", affine(5, 6, 1));
    auto right = build.unit("right", affine(5, 6, 2));
    auto join = build.unit("join", affine(6, 2, 3));
    return [=] {
      const at::Tensor x = input(4, 5, 0);
      return join(left(x) * right(x)).pow(2).mean();
    };
  });
}

TEST(Units, WhoseOutputIsChangedInPlaceGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1));
    auto second = build.unit("second", affine(6, 2, 2));
    return [=] {
      at::Tensor x = first(input(4, 5, 0));
      x.add_(1).mul_(0.5);
      return second(x).pow(2).mean();
    };
  });
}

TEST(Units, WithResidualsAroundThemGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(6, 6, 1));
    auto second = build.unit("second", affine(6, 6, 2));
    return [=] {
      at::Tensor x = input(4, 6, 0);
      x = x + at::gelu(first(x));
      x = x + at::gelu(second(x));
      return x.pow(2).mean();
    };
  });
}

TEST(Units, RecomputedGivePlainGradients) {
  for (const bool in_front : {false, true}) {
    expect_plain_gradients([in_front](Builder& build) -> Built {
      auto first = build.unit("first", affine(6, 6, 1), in_front);
      auto second = build.unit("second", affine(6, 6, 2), true);
      auto third = build.unit("third", affine(6, 3, 3), !in_front);
      return [=] { return third(at::gelu(second(at::gelu(first(input(4, 6, 0)))))).pow(2).mean(); };
    });
  }
}

// Two outputs, of which one is used; an input that needs no gradient; a parameter that is not used.
struct SplitImpl : torch::nn::Module {
  SplitImpl() {
    weight = register_parameter("weight", input(6, 5, 2));
    unused = register_parameter("unused", input(3, 3, 5));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& mask) {
    const at::Tensor y = at::linear(x, weight) * mask;
    return {y, y * 2};
  }
  at::Tensor weight;
  at::Tensor unused;
};

TEST(Units, WithSeveralOutputsAndAnUnusedParameterGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 5, 1));
    auto split = build.unit("split", std::make_shared<SplitImpl>());
    return [=] {
      const auto [used, ignored] = split(first(input(4, 5, 0)), at::ones({4, 6}));
      return used.pow(2).mean();
    };
  });
}

// A unit inside a unit: a member that is no registered child.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(Unit<AffineImpl> unit) : inner(std::move(unit)) {
    scale = register_parameter("scale", at::full({6}, 0.7));
  }
  at::Tensor forward(const at::Tensor& x) { return at::gelu(inner(x * scale)) * scale; }
  Unit<AffineImpl> inner;
  at::Tensor scale;
};

TEST(Units, InsideUnitsGivePlainGradients) {
  for (const bool recompute : {false, true}) {
    expect_plain_gradients([recompute](Builder& build) -> Built {
      auto inner = build.unit("inner", affine(6, 6, 1));
      auto outer =
          build.unit("outer", std::make_shared<OuterImpl>(inner), recompute && build.recomputes());
      return [=] { return outer(input(4, 6, 0)).pow(2).mean(); };
    });
  }
}

// The input is a leaf, and its gradient is complete long before the weights have been read.
struct LateProductImpl : torch::nn::Module {
  LateProductImpl() {
    first = register_parameter("first", input(6, 6, 1));
    frozen = register_parameter("frozen", input(6, 6, 2), false);
    unused = register_parameter("unused", input(3, 3, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(at::gelu(at::linear(input(4, 6, 0), first)), frozen) * x;
  }
  at::Tensor first;
  at::Tensor frozen;
  at::Tensor unused;
};

TEST(Units, WhoseInputIsALeafThatIsReadyFirstGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto unit = build.unit("unit", std::make_shared<LateProductImpl>());
    return [=] { return unit(input(4, 6, 7).set_requires_grad(true)).pow(2).mean(); };
  });
}

// Its input is changed in place by a frozen weight, which backward reads last.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() {
    scale = register_parameter("scale", at::full({6}, 0.7), false);
    weight = register_parameter("weight", input(6, 6, 2));
    unused = register_parameter("unused", input(3, 3, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    x.mul_(scale);
    return at::linear(x, weight);
  }
  at::Tensor scale;
  at::Tensor weight;
  at::Tensor unused;
};

TEST(Units, ThatChangeTheirInputInPlaceGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 6, 1));
    auto second = build.unit("second", std::make_shared<InPlaceImpl>());
    return [=] { return second(first(input(4, 5, 0)) * 2).pow(2).mean(); };
  });
}

// The second output's gradient comes after the unit's input has had its own.
TEST(Units, WhoseSecondOutputIsDifferentiatedLaterGivePlainGradients) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto first = build.unit("first", affine(5, 5, 1));
    auto split = build.unit("split", std::make_shared<SplitImpl>());
    auto last = build.unit("last", affine(6, 6, 3));
    return [=] {
      const at::Tensor x = first(input(4, 5, 0));
      const auto [near, far] = split(x, at::ones({4, 6}));
      return (last(far) * near).pow(2).mean() + x.sum();
    };
  });
}

// A weight whose memory order is not that of its logical shape.
struct TransposedImpl : torch::nn::Module {
  TransposedImpl() { weight = register_parameter("weight", input(5, 7, 1).t()); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

TEST(Units, KeepTheStridesOfTheirParameters) {
  expect_plain_gradients([](Builder& build) -> Built {
    auto unit = build.unit("unit", std::make_shared<TransposedImpl>());
    EXPECT_EQ(unit->weight.stride(0), 1);
    return [=] { return unit(input(4, 5, 0)).pow(2).mean(); };
  });
}

TEST(Backward, OverSeveralRootsAddsThem) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const Taken taken = values_of(engine);
    const at::Tensor y = unit(input(4, 5, 0));
    engine.backward(std::vector<at::Tensor>{y.sum(), (y * 2).sum()});
    const StepResult result = engine.step();
    const auto plain = affine(5, 6, 1);
    const at::Tensor z = plain->forward(input(4, 5, 0));
    (z.sum() + (z * 2).sum()).backward();
    EXPECT_TRUE(at::allclose(taken.gradient(engine)[0], plain->weight.grad(), 1e-5, 1e-5));
    EXPECT_NEAR(result.loss, (z.sum() * 3).item<double>(), 1e-5);
  });
}

TEST(Backward, WeighsMicroBatchesAndRanks) {
  // Rank r's micro-batch m has rows r + m + 1; the mean over all rows is wanted.
  with_engines(3, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const Taken taken = values_of(engine);
    std::vector<at::Tensor> rows;
    for (int rank = 0; rank < 3; ++rank) {
      for (int micro = 0; micro < 2; ++micro) {
        const at::Tensor x = input(rank + micro + 1, 5, 10 * rank + micro);
        rows.push_back(x);
        if (rank == group.rank()) {
          engine.backward(unit(x).pow(2).sum(1).mean(), static_cast<double>(x.size(0)));
        }
      }
    }
    const StepResult result = engine.step();
    const auto plain = affine(5, 6, 1);
    const at::Tensor loss = plain->forward(at::cat(rows)).pow(2).sum(1).mean();
    loss.backward();
    EXPECT_TRUE(at::allclose(taken.gradient(engine)[0], plain->weight.grad(), 1e-5, 1e-6));
    EXPECT_NEAR(result.loss, loss.item<double>(), 1e-5);
    EXPECT_EQ(result.weight, 15);
  });
}

TEST(Autograd, MayBeAskedForGradientsOfInputsOutsideOfTraining) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 2, 2));
    const at::Tensor x = input(4, 5, 0).set_requires_grad(true);
    const at::Tensor loss = second(at::gelu(first(x))).pow(2).mean();
    const at::Tensor found = torch::autograd::grad({loss}, {x})[0];
    const auto plain_first = affine(5, 6, 1);
    const auto plain_second = affine(6, 2, 2);
    const at::Tensor x2 = input(4, 5, 0).set_requires_grad(true);
    plain_second->forward(at::gelu(plain_first->forward(x2))).pow(2).mean().backward();
    EXPECT_TRUE(at::equal(found, x2.grad()));
    // And training goes on.
    train_step(engine, second(at::gelu(first(input(4, 5, 0)))).pow(2).mean());
  });
}

TEST(Evaluation, WithoutGradientsBetweenStepsChangesNothing) {
  std::vector<double> losses[2];
  for (const bool evaluates : {false, true}) {
    with_engines(2, [&](Engine& engine, comm::Group& group) {
      auto first = engine.unit("first", affine(5, 6, 1));
      auto second = engine.unit("second", affine(6, 2, 2));
      const auto loss = [&] { return second(at::gelu(first(input(4, 5, 0)))).pow(2).mean(); };
      for (int step = 0; step < 5; ++step) {
        if (evaluates && step % 2 == 1) {
          const at::NoGradGuard no_grad;
          loss();
        }
        const StepResult result = train_step(engine, loss());
        if (group.rank() == 0) {
          losses[evaluates ? 1 : 0].push_back(result.loss);
        }
      }
    });
  }
  EXPECT_EQ(losses[0], losses[1]);
}

}  // namespace
}  // namespace tessera::testing
