// Where and as what parameters are made, and the way back to plain tensors.
#include "tessera/engine/build_scope.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/custom_function.h>
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

// Of a world with a tensor axis: the ranks with one place on it train one part of the model.
TEST(BuildScope, TheHostsOfAGroupAreThoseOfItsRanksInTheWorld) {
  struct World {
    int ranks;
    int per_host;
    int tensor_size;
    const char* mesh;
  };
  for (const World& each : {World{4, 2, 2, "mesh: 2 ranks = 1 copy x 2 shards, on 2 hosts of 1"},
                            World{8, 4, 4, "mesh: 2 ranks = 1 copy x 2 shards, on 2 hosts of 1"},
                            World{8, 4, 2, "mesh: 4 ranks = 1 copy x 4 shards, on 2 hosts of 2"},
                            World{4, 2, 4, "mesh: 1 rank = 1 copy x 1 shard, on one host"}}) {
    SCOPED_TRACE(each.mesh);
    Config config = quiet_config();
    config.set("comm.ranks_per_host", std::int64_t{each.per_host});
    config.apply_flag("persist.param_bytes=0");
    comm::run_ranks(each.ranks, [&](comm::Group& world) {
      Runtime runtime(config, world, {-1, 1});
      const auto data = world.split(world.rank() % each.tensor_size, "data");
      const BuildScope scope({.group = data.get()});
      Engine engine(runtime);
      EXPECT_EQ(engine.mesh().describe(), each.mesh);
      auto unit = engine.unit("unit", affine(5, 6, 1));
      train_step(engine, unit(input(4, 5, world.rank())).sum());
      const EngineStats stats = engine.take_stats();
      EXPECT_EQ(stats.sent_inside_bytes > 0, engine.mesh().ranks_per_host() > 1);
      EXPECT_EQ(stats.sent_across_bytes > 0, engine.mesh().num_hosts() > 1);
    });
  }
}

TEST(BuildScope, SecondaryShardsOfAGroupStayOnTheHostsOfTheWorld) {
  Config config = quiet_config();
  config.apply_flag("comm.ranks_per_host=2");
  config.apply_flag("shard.secondary_group_size=2");
  comm::run_ranks(4, [&](comm::Group& world) {
    Runtime runtime(config, world, {-1, 1});
    const auto data = world.split(world.rank() % 2, "data");
    const BuildScope scope({.group = data.get()});
    EXPECT_SAYS("do not divide its 1 rank; leave it out", Engine engine(runtime));
  });
}

// Ranks 0 and 1 share a host, rank 2 is alone on another.
TEST(BuildScope, AGroupOnUnevenHostsSaysSoAndRefusesWhatNeedsThem) {
  Config config = quiet_config();
  config.apply_flag("comm.ranks_per_host=2");
  config.apply_flag("quant.gradients=true");
  comm::run_ranks(4, [&](comm::Group& world) {
    Runtime runtime(config, world, {-1, 1});
    const auto part = world.split(world.rank() / 3, "part");
    if (world.rank() == 3) {
      return;
    }
    const BuildScope scope({.group = part.get()});
    Engine engine(runtime);
    EXPECT_EQ(engine.mesh().describe(),
              "mesh: 3 ranks = 1 copy x 3 shards, on hosts that are not equal blocks of ranks");
    EXPECT_FALSE(engine.mesh().two_hops());
    auto unit = engine.unit("unit", affine(5, 6, 1));
    train_step(engine, unit(input(4, 5, world.rank())).sum());
    const EngineStats stats = engine.take_stats();
    EXPECT_GT(stats.sent_across_bytes, 0U);
    EXPECT_EQ(stats.sent_inside_bytes > 0, world.rank() < 2) << "nobody shares the host of rank 2";
  });
  for (const char* const option :
       {"shard.secondary_group_size=2", "shard.hierarchical_gather=true", "shard.group_size=2"}) {
    config = quiet_config();
    config.apply_flag("comm.ranks_per_host=2");
    config.apply_flag(option);
    comm::run_ranks(6, [&](comm::Group& world) {
      Runtime runtime(config, world, {-1, 1});
      const auto part = world.split(world.rank() == 1 || world.rank() == 3 ? 1 : 0, "part");
      if (part->size() == 4) {  // 0, 2, 4 and 5
        const BuildScope scope({.group = part.get()});
        EXPECT_SAYS("these 4 ranks are spread otherwise. Start them host by host",
                    Engine engine(runtime));
      }
    });
  }
}

// --- A tensor axis: what docs/multi-node.md shows.

// The sum over the tensor axis; of its gradient every rank has the whole.
struct SumOverAxis : torch::autograd::Function<SumOverAxis> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& part,
                            comm::Group* axis) {
    at::Tensor sum = part.contiguous().clone();
    axis->start_all_reduce(sum.data_ptr(), sum.numel(), DType::kFloat32).wait();
    return sum;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               torch::autograd::tensor_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// Of two layers this rank's columns of the first, and rows of the second; all of them without axis.
struct TensorParallelImpl : torch::nn::Module {
  TensorParallelImpl(int part, int num_parts, comm::Group* axis) : axis_(axis) {
    const at::Tensor all_up = input(8, 5, 1);
    const at::Tensor all_down = input(6, 8, 2);
    up = register_parameter("up", all_up.chunk(num_parts, 0)[part].clone());
    down = register_parameter("down", all_down.chunk(num_parts, 1)[part].contiguous());
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor part = at::linear(at::gelu(at::linear(x, up)), down);
    return axis_ == nullptr ? part : SumOverAxis::apply(part, axis_);
  }
  at::Tensor up, down;
  comm::Group* axis_;
};

TEST(BuildScope, RanksOfATensorAxisHoldPartsAndOnlyTheDataAxisAverages) {
  TensorParallelImpl plain(0, 1, nullptr);
  for (int data = 0; data < 2; ++data) {
    (plain.forward(input(4, 5, data)).pow(2).mean() / 2).backward();
  }
  const at::Tensor up = plain.up.detach() - plain.up.grad();
  const at::Tensor down = plain.down.detach() - plain.down.grad();
  comm::run_ranks(4, [&](comm::Group& world) {
    constexpr int kTensorSize = 2;
    const int tensor_rank = world.rank() % kTensorSize;
    const int data_rank = world.rank() / kTensorSize;
    const auto tensor = world.split(data_rank, "tensor");  // one batch, parts of the model
    const auto data = world.split(tensor_rank, "data");    // one part, other batches
    Runtime runtime(quiet_config(), world, {-1, 1});
    const BuildScope scope({.group = data.get()});
    Engine engine(runtime);
    auto unit = engine.unit(
        "mlp", std::make_shared<TensorParallelImpl>(tensor_rank, kTensorSize, tensor.get()));
    EXPECT_EQ(engine.param(0).layout().num_ranks(), 2);
    train_step(engine, unit(input(4, 5, data_rank)).pow(2).mean());
    EXPECT_TRUE(
        at::allclose(engine.full_value(0), up.chunk(kTensorSize, 0)[tensor_rank], 1e-5, 1e-6));
    EXPECT_TRUE(
        at::allclose(engine.full_value(1), down.chunk(kTensorSize, 1)[tensor_rank], 1e-5, 1e-6));
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
