// What goes wrong says so by name, and the engine goes on.
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/contains.h"

namespace tessera::testing {
namespace {

struct ThrowingImpl : torch::nn::Module {
  ThrowingImpl() { weight = register_parameter("weight", input(6, 6, 1)); }
  at::Tensor forward(const at::Tensor& x) {
    if (throws) {
      throw std::runtime_error("the user's forward failed");
    }
    at::Tensor y = at::linear(x, weight);
    if (throws_in_hook) {
      y.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("the user's hook failed");
      });
    }
    return y;
  }
  bool throws = false;
  bool throws_in_hook = false;
  at::Tensor weight;
};

TEST(Exceptions, InForwardAndHooksReachTheCallerAndTheEngineGoesOn) {
  for (const int ranks : {1, 3}) {
    std::vector<double> expected;
    for (const bool disturbed : {false, true}) {
      std::vector<double> losses;
      with_engines(ranks, [&](Engine& engine, comm::Group& group) {
        auto first = engine.unit("first", affine(5, 6, 1));
        auto middle = engine.unit("middle", std::make_shared<ThrowingImpl>());
        auto last = engine.unit("last", affine(6, 2, 2));
        const auto loss = [&] {
          return last(at::gelu(middle(at::gelu(first(input(4, 5, 0)))))).pow(2).mean();
        };
        for (int step = 0; step < 6; ++step) {
          if (disturbed && (step == 1 || step == 4)) {
            middle->throws = true;
            EXPECT_SAYS("the user's forward failed", loss());
            middle->throws = false;
          }
          if (disturbed && step == 3) {
            middle->throws_in_hook = true;
            EXPECT_SAYS("the user's hook failed", engine.backward(loss()));
            middle->throws_in_hook = false;
            EXPECT_SAYS("The failure was: the user's hook failed", engine.step());
            engine.zero_grad();
          }
          const StepResult result = train_step(engine, loss());
          if (group.rank() == 0) {
            losses.push_back(result.loss);
          }
        }
      });
      if (disturbed) {
        EXPECT_EQ(losses, expected) << ranks << " ranks";
      } else {
        expected = losses;
      }
    }
  }
}

TEST(Exceptions, OfOneRankAreNamedOnTheOthers) {
  const auto failures = failures_of(2, quiet_config(), [](Engine& engine, comm::Group& group) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 2, 2));
    const at::Tensor x = first(input(4, 5, 0));
    if (group.rank() == 1) {
      throw std::runtime_error("out of cheese");
    }
    train_step(engine, second(x).sum());
  });
  ASSERT_TRUE(failures[0] && failures[1]);
  EXPECT_SAYS("out of cheese", std::rethrow_exception(failures[0]));
}

struct SometimesAllImpl : torch::nn::Module {
  SometimesAllImpl()
      : weight(register_parameter("weight", input(30, 30, 1))),
        other(register_parameter("other", input(30, 30, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x, uses_all ? weight + other : weight);
  }
  bool uses_all = false;
  at::Tensor weight;
  at::Tensor other;
};

// Rank 0 has no gradient of `last.other`, so it starts that parameter's reduction at the end of its
// backward, for which it needs the weights of `first` from rank 1; and that has started the
// reduction when its hook throws.
TEST(Exceptions, BesideReductionsThatOthersCannotStartReachEveryRank) {
  for (const bool is_caught : {false, true}) {
    SCOPED_TRACE(is_caught ? "caught" : "not caught");
    Config config = quiet_config();
    config.set("grad.bucket_bytes", std::string("1KiB"));
    config.set("live.limit_bytes", std::string("0"));
    config.set("persist.param_bytes", std::string("0"));
    config.set("prefetch.bucket_bytes", std::string("0"));
    comm::GroupOptions options;
    options.heartbeat = std::chrono::milliseconds(20);
    options.timeout = std::chrono::seconds(60);  // which a wait that must not be would end at
    comm::ThreadWorldOptions world;
    world.num_ranks = 2;
    const auto failures = comm::run_ranks_collecting(world, options, [&](comm::Group& group) {
      Runtime runtime(config, group, {-1, 1});
      {
        Engine engine(runtime);
        auto first = engine.unit("first", affine(5, 30, 1));
        auto middle = engine.unit("middle", affine(30, 30, 2));
        auto last = engine.unit("last", std::make_shared<SometimesAllImpl>());
        last->uses_all = group.rank() == 1;
        const at::Tensor x = first(input(4, 5, 0));
        if (group.rank() == 1) {
          x.register_hook(
              [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of cheese"); });
        }
        const at::Tensor loss = last(middle(x)).pow(2).mean();
        if (group.rank() == 1 && is_caught) {
          EXPECT_SAYS("out of cheese", engine.backward(loss));
        } else {
          train_step(engine, loss);
        }
      }
      throw std::runtime_error("out of cheese, and of engines");
    });
    ASSERT_TRUE(failures[1]);
    EXPECT_SAYS("out of cheese", std::rethrow_exception(failures[1]));
    ASSERT_TRUE(failures[0]);
    const std::string told = message_of([&] { std::rethrow_exception(failures[0]); });
    EXPECT_NE(told.find("rank 1"), std::string::npos) << told;
    EXPECT_EQ(told.find("comm.timeout_s"), std::string::npos) << told;
  }
}

TEST(ReleasedParameters, AreNotReadable) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    EXPECT_EQ(unit->weight.numel(), 30);
    EXPECT_EQ(unit->weight.sizes(), (std::vector<std::int64_t>{6, 5}));
    EXPECT_ANY_THROW(unit->weight.sum());
    EXPECT_ANY_THROW(unit->forward(input(4, 5, 0)));
    train_step(engine, unit(input(4, 5, 0)).sum());
    EXPECT_ANY_THROW(unit->weight.sum());
  });
}

TEST(Mistakes, SayWhatToDo) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    EXPECT_SAYS("without a backward", engine.step());
    auto unit = engine.unit("unit", affine(5, 6, 1));
    EXPECT_SAYS("two units 'unit'", engine.unit("unit", affine(5, 6, 2)));
    EXPECT_SAYS("'other.weight'", {
      auto module = affine(5, 6, 1);
      module->to(at::kDouble);
      engine.unit("other", module);
    });
    EXPECT_SAYS("one number", engine.backward(unit(input(4, 5, 0))));
    EXPECT_SAYS("weight=-1", engine.backward(unit(input(4, 5, 0)).sum(), -1));
    EXPECT_SAYS("does not depend", engine.backward(input(1, 1, 0).sum()));
    EXPECT_SAYS("engine.backward(loss)", unit(input(4, 5, 0)).sum().backward());
    EXPECT_SAYS("after the first forward", engine.unit("late", affine(5, 6, 2)));
    EXPECT_SAYS("no parameter of a unit", {
      Engine other(engine.runtime());
      auto mine = other.unit("mine", affine(5, 6, 3));
      other.add_external(mine, at::ones({3}));
    });
    train_step(engine, unit(input(4, 5, 0)).sum());
    EXPECT_SAYS("without a backward", engine.step());
  });
}

TEST(Mistakes, WithTwoEnginesNameTheOtherOne) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    Engine second(engine.runtime());
    auto a = engine.unit("a", affine(5, 6, 1));
    auto b = second.unit("b", affine(6, 2, 2));
    EXPECT_SAYS("parameter 'again.weight' belongs to another engine",
                second.unit("again", a.module()));
    EXPECT_SAYS("arrived in the backward() of another engine",
                engine.backward(b(a(input(4, 5, 0))).sum()));
    engine.zero_grad();
    second.zero_grad();
  });
}

TEST(Mistakes, WithAModelOfAnotherMeshNameBothMeshes) {
  comm::run_ranks(2, [](comm::Group& group) {
    Runtime runtime(quiet_config(), group, {-1, 1});
    Engine engine(runtime);
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const auto alone = group.split(group.rank(), "alone");
    const BuildScope scope({.group = alone.get()});
    Engine other(runtime);
    const auto expect_both = [&] {
      const std::string text = message_of([&] { other.unit("again", unit.module()); });
      EXPECT_HAS(text,
                 "parameter 'again.weight' belongs to another engine, or to one that is gone "
                 "(mesh: 2 ranks = 1 copy x 2 shards, on one host; this engine: mesh: 1 rank "
                 "= 1 copy x 1 shard, on one host)");
    };
    expect_both();
    const GatheredScope gathered = engine.gathered({unit->weight});  // it has memory now
    expect_both();
  });
}

TEST(Mistakes, WithAModuleWhoseEngineIsGoneSaySo) {
  auto module = affine(5, 6, 1);
  with_engines(1, [&](Engine& engine, comm::Group&) { engine.unit("unit", module); });
  EXPECT_SAYS("its engine is gone", module->weight.sum());
}

TEST(Mistakes, WithASecondBackwardSayWhatToDoHere) {
  for (const bool recompute : {false, true}) {
    with_engines(2, [&](Engine& engine, comm::Group&) {
      auto unit = engine.unit("unit", affine(5, 6, 1), {.recompute = recompute});
      const at::Tensor loss = unit(input(4, 5, 0)).pow(2).sum();
      engine.backward(loss);
      EXPECT_SAYS("a second backward through the graph of one forward", engine.backward(loss));
      engine.zero_grad();
    });
  }
}

TEST(Mistakes, WithAUnitOverUnitsThatWouldGatherThemAllAreWarnedOf) {
  struct RootImpl : torch::nn::Module {
    RootImpl(std::shared_ptr<AffineImpl> left, std::shared_ptr<AffineImpl> right) {
      register_module("left", std::move(left));
      register_module("right", std::move(right));
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  Config config = quiet_config();
  config.set("log.level", std::string("warn"));
  ::testing::internal::CaptureStderr();
  with_engines(1, config, [](Engine& engine, comm::Group&) {
    auto left = affine(5, 6, 1);
    auto right = affine(6, 2, 2);
    engine.unit("left", left);
    engine.unit("right", right);
    engine.unit("root", std::make_shared<RootImpl>(left, right));
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("unit 'root' has all parameters of units 'left', 'right' as its own"),
            std::string::npos)
      << said;
}

TEST(ReleasedParameters, AreToldWithoutAStackTraceWhereAUnitReadsThem) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto weight = first->weight;
    auto reads = engine.function("reads", {},
                                 [weight](const at::Tensor& x) { return at::linear(x, weight); });
    const std::string said = message_of([&] { reads(input(4, 5, 0)); });
    EXPECT_NE(said.find("parameter 'first.weight' is released"), std::string::npos) << said;
    EXPECT_EQ(said.find("Exception raised from"), std::string::npos) << said;
  });
}

TEST(ReleasedParameters, AreToldWithoutAStackTraceWhereABackwardReadsThem) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(5, 6, 1));
    auto second = engine.unit("second", affine(6, 6, 2));
    const at::Tensor middle = first(input(4, 5, 0));
    middle.register_hook(
        [weight = second->weight](const at::Tensor& gradient) { return gradient + weight.sum(); });
    const std::string said = message_of([&] { engine.backward(second(middle).sum()); });
    EXPECT_NE(said.find("parameter 'second.weight' is released"), std::string::npos) << said;
    EXPECT_EQ(said.find("Exception raised from"), std::string::npos) << said;
  });
}

TEST(NonFiniteGradients, SkipTheStepOnAllRanks) {
  for (const bool skips : {true, false}) {
    Config config = quiet_config();
    config.set("grad.skip_nonfinite", skips);
    with_engines(2, config, [&](Engine& engine, comm::Group& group) {
      auto unit = engine.unit("unit", affine(5, 6, 1));
      const at::Tensor before = engine.full_value(0);
      at::Tensor x = input(4, 5, 0);
      if (group.rank() == 1) {
        x[0][0] = std::numeric_limits<float>::infinity();
      }
      const StepResult result = train_step(engine, unit(x).pow(2).sum());
      EXPECT_EQ(result.skipped, skips);
      EXPECT_FALSE(std::isfinite(result.grad_norm));
      EXPECT_EQ(at::equal(engine.full_value(0), before), skips);
      engine.backward(unit(input(4, 5, 0)).pow(2).sum());
      EXPECT_EQ(std::isfinite(engine.step().grad_norm), skips);
    });
  }
}

TEST(Engines, MayShareARuntime) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    Engine second(engine.runtime());
    auto a = engine.unit("unit", affine(5, 6, 1));
    auto b = second.unit("unit", affine(6, 2, 2));
    const at::Tensor frozen_input = [&] {
      const at::NoGradGuard no_grad;
      return a(input(4, 5, 0));
    }();
    second.backward(b(frozen_input).pow(2).mean());
    second.step();
    train_step(engine, a(input(4, 5, 0)).pow(2).mean());
  });
}

}  // namespace
}  // namespace tessera::testing
