// Where and as what parameters are made, and the way back to plain tensors.
#include "tessera/engine/build_scope.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include <c10/core/DefaultDtype.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

at::ScalarType default_type() { return c10::get_default_dtype_as_scalartype(); }

TEST(BuildScope, TheInnermostTypeDecidesAndLeavingRestores) {
  ASSERT_EQ(default_type(), at::kFloat);
  with_engines(1, [](Engine& engine, comm::Group&) {
    try {
      const BuildScope outer({.dtype = DType::kFloat16});
      {
        const BuildScope silent({});
        const BuildScope inner({.dtype = DType::kBFloat16});
        EXPECT_EQ(default_type(), at::kBFloat16);
        EXPECT_EQ(torch::nn::Linear(3, 4)->weight.scalar_type(), at::kBFloat16);
        auto unit = engine.unit("unit", affine(5, 6, 1));  // made as fp32
        EXPECT_EQ(engine.param(0).layout().dtype(), DType::kBFloat16);
        EXPECT_TRUE(unit->weight.requires_grad());
        EXPECT_TRUE(at::equal(engine.full_value(0), affine(5, 6, 1)->weight.to(at::kBFloat16)));
      }
      EXPECT_EQ(default_type(), at::kHalf);
      throw std::runtime_error("out of the scope");
    } catch (const std::runtime_error&) {
      EXPECT_EQ(default_type(), at::kFloat);
    }
  });
  EXPECT_EQ(BuildScope::current().dtype, std::nullopt);
}

TEST(BuildScope, RefusesWhatIsNotThere) {
  EXPECT_SAYS("tier='nvme' is not there yet", BuildScope({.tier = "nvme"}));
  EXPECT_SAYS("cannot be int64", BuildScope({.dtype = DType::kInt64}));
  EXPECT_EQ(default_type(), at::kFloat);
}

TEST(BuildScope, TheOutermostTierCounts) {
  comm::run_ranks(2, [](comm::Group& group) {
    Runtime runtime(quiet_config(), group, {-1, 1});
    const BuildScope outer({.tier = "host"});
    const BuildScope inner({.tier = "device"});
    Engine engine(runtime);
    auto unit = engine.unit("unit", affine(5, 6, 1));
    EXPECT_GT(runtime.ledger().current_bytes(Tier::kHost, Role::kShard), 0U);
    EXPECT_EQ(runtime.ledger().current_bytes(Tier::kDevice, Role::kShard), 0U);
    train_step(engine, unit(input(4, 5, 0)).sum());
  });
}

// Four ranks train two models, each sharded over its own two ranks.
TEST(BuildScope, AnEngineTrainsOverTheGivenGroup) {
  const auto plain = affine(5, 6, 1);
  plain->forward(input(4, 5, 0)).pow(2).mean().backward();
  const at::Tensor expected = plain->weight.detach() - plain->weight.grad();
  comm::run_ranks(4, [&](comm::Group& world) {
    Runtime runtime(quiet_config(), world, {-1, 1});
    const auto half = world.split(world.rank() / 2, "half");
    const BuildScope scope({.group = half.get()});
    Engine engine(runtime);
    auto unit = engine.unit("unit", affine(5, 6, 1));
    EXPECT_EQ(engine.param(0).layout().num_ranks(), 2);
    // The other half's numbers do not come in.
    engine.backward(unit(input(4, 5, 0)).pow(2).mean(), world.rank() < 2 ? 1 : 3);
    EXPECT_EQ(engine.step().weight, world.rank() < 2 ? 2 : 6);
    EXPECT_TRUE(at::allclose(engine.full_value(0), expected, 1e-5, 1e-6));
  });
}

TEST(BuildScope, AGroupOfOneInAWorldOfSeveralMustBeGiven) {
  ASSERT_EQ(setenv("TESSERA_RANK", "0", 1), 0);
  ASSERT_EQ(setenv("TESSERA_WORLD_SIZE", "2", 1), 0);
  ASSERT_EQ(setenv("TESSERA_STORE_HOST", "127.0.0.1", 1), 0);
  ASSERT_EQ(setenv("TESSERA_STORE_PORT", "29999", 1), 0);
  comm::run_ranks(1, [](comm::Group& group) {
    Runtime runtime(quiet_config(), group, {-1, 1});
    EXPECT_SAYS("a group of one rank in a world of 2", Engine engine(runtime));
    const BuildScope scope({.group = &group});
    EXPECT_NO_THROW(Engine engine(runtime));
  });
  for (const char* name :
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_STORE_HOST", "TESSERA_STORE_PORT"}) {
    unsetenv(name);
  }
}

// A transposed weight, a tied one, a frozen one.
struct SmallModelImpl : torch::nn::Module {
  SmallModelImpl() {
    weight = register_parameter("weight", input(5, 7, 1).t());
    bias = register_parameter("bias", input(1, 7, 2)[0], false);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight;
  at::Tensor bias;
};

TEST(ToPlain, GivesTheModelBackWithItsValuesAndStrides) {
  const auto reference = std::make_shared<SmallModelImpl>();
  reference->forward(input(4, 5, 0)).pow(2).mean().backward();
  for (const bool recompute : {false, true}) {
    for (const int ranks : {1, 2, 3}) {
      comm::run_ranks(ranks, [&](comm::Group& group) {
        const auto module = std::make_shared<SmallModelImpl>();
        Unit<SmallModelImpl> unit;
        at::Tensor trained;
        {
          Runtime runtime(quiet_config(), group, {-1, 1});
          Engine engine(runtime);
          unit = engine.unit("unit", module, {.recompute = recompute});
          train_step(engine, unit(input(4, 5, 0)).pow(2).mean());
          trained = engine.full_value(0);
          engine.to_plain();
          EXPECT_TRUE(at::equal(module->weight, trained));
          EXPECT_SAYS("cannot train", engine.backward(unit(input(4, 5, 0)).sum()));
          EXPECT_SAYS("cannot train", engine.step());
          EXPECT_SAYS("cannot train", engine.gathered({module->weight}).close());
        }
        // The engine is gone, and the model goes on as plain autograd.
        EXPECT_EQ(module->weight.stride(0), 1);
        EXPECT_TRUE(at::equal(module->bias, reference->bias));
        unit(input(4, 5, 0)).pow(2).mean().backward();
        EXPECT_TRUE(module->weight.grad().defined());
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(
            at::allclose(module->weight, reference->weight - reference->weight.grad(), 1e-5, 1e-6));
        module->weight.sub_(module->weight.grad());
        EXPECT_FALSE(at::equal(module->weight, trained));
      });
    }
  }
}

TEST(Units, SayThatTheirEngineIsGone) {
  comm::run_ranks(1, [](comm::Group& group) {
    Runtime runtime(quiet_config(), group, {-1, 1});
    Unit<AffineImpl> unit;
    {
      Engine engine(runtime);
      unit = engine.unit("unit", affine(5, 6, 1));
    }
    EXPECT_SAYS("unit 'unit' runs after its engine is gone", unit(input(4, 5, 0)));
  });
}

// Buffers of every kind, different on each rank before the unit is made.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(int rank) {
    weight = register_parameter("weight", input(3, 3, 0));
    real = register_buffer("real", input(2, 3, rank));
    whole = register_buffer("whole", at::arange(5, at::kLong) + rank);
    turned = register_buffer("turned", input(3, 4, rank + 7).t());
    mask = register_buffer("mask", at::arange(3) > rank);
    none = register_buffer("none", at::empty({0}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight, real, whole, turned, mask, none;
};

TEST(Buffers, AreThoseOfRankZeroOnEveryRank) {
  with_engines(3, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", std::make_shared<BufferedImpl>(group.rank()));
    const BufferedImpl zero(0);
    EXPECT_TRUE(at::equal(unit->real, zero.real));
    EXPECT_TRUE(at::equal(unit->whole, zero.whole));
    EXPECT_TRUE(at::equal(unit->turned, zero.turned));
    EXPECT_EQ(unit->turned.stride(0), 1);
    EXPECT_TRUE(at::equal(unit->mask, zero.mask));
  });
}

TEST(Buffers, OfRunningStatisticsStayEachRanksOwnAfterwards) {
  with_engines(2, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("norm", torch::nn::BatchNorm1d(3).ptr());
    train_step(engine, unit(input(8, 3, group.rank()) + group.rank()).pow(2).mean());
    torch::nn::BatchNorm1d plain(3);
    plain(input(8, 3, group.rank()) + group.rank());
    EXPECT_TRUE(at::equal(unit->running_mean, plain->running_mean));
    EXPECT_EQ(unit->num_batches_tracked.item<std::int64_t>(), 1);
  });
}

}  // namespace
}  // namespace tessera::testing
