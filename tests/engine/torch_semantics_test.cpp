// What torch does, the engine does: which parameters are updated, which graphs are refused, and
// what exceptions leave behind.
#include <chrono>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/autograd/variable.h>

#include "tests/engine/engine_fixture.h"
#include "tests/engine/run_options.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

// In step s ranks use the branch where (s + rank) % 3 == 0: with one rank it is left out in two
// steps of three, with two it is used by one rank alone or by none.
bool is_used(int step, int rank) { return (step + rank) % 3 == 0; }

struct BranchImpl : torch::nn::Module {
  BranchImpl() {
    always = register_parameter("always", input(6, 5, 1));
    sometimes = register_parameter("sometimes", input(6, 5, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool uses) {
    const at::Tensor h = at::linear(x, always);
    return uses ? h * at::linear(x, sometimes) : h;
  }
  at::Tensor always;
  at::Tensor sometimes;
};

// A parameter inside of a unit; or a unit that only some ranks use.
struct Branching {
  explicit Branching(Engine* engine, bool is_dynamic) : is_dynamic(is_dynamic) {
    auto unit_module = std::make_shared<BranchImpl>();
    auto dynamic_module = affine(6, 6, 3);
    for (const at::Tensor& param : unit_module->parameters()) {
      params.push_back(param);
    }
    if (is_dynamic) {
      params.push_back(dynamic_module->weight);
      params.push_back(dynamic_module->bias);
    }
    if (engine == nullptr) {
      unit = Unit<BranchImpl>(unit_module);
      expert = Unit<AffineImpl>(dynamic_module);
      return;
    }
    unit = engine->unit("unit", unit_module);
    if (is_dynamic) {
      expert = engine->unit("expert", dynamic_module, {.dynamic = true});
    }
  }
  at::Tensor loss(int step, int rank) const {
    const bool uses = is_used(step, rank);
    at::Tensor h = unit(input(4, 5, step), !is_dynamic && uses);
    if (is_dynamic && uses) {
      h = h + expert(h);
    }
    return h.pow(2).mean();
  }
  const bool is_dynamic;
  Unit<BranchImpl> unit;
  Unit<AffineImpl> expert;
  std::vector<at::Tensor> params;
};

TEST(UnusedParameters, StayAsTheyAreWithTheirStatesUntilSomeRankUsesThem) {
  constexpr int kSteps = 6;
  const DiskDirectory directory;
  const std::vector<Placed> places = {
      {"resident", {}},
      {"host", {{"place.parameters", "host"}, {"place.optimizer", "host"}}},
      {"nvme",
       joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory))}};
  for (const std::string kind : {"adamw", "sgd"}) {
    for (const int ranks : {1, 2}) {
      for (const bool is_dynamic : {false, true}) {
        SCOPED_TRACE(kind + ", " + std::to_string(ranks) + " ranks, dynamic " +
                     std::to_string(is_dynamic));
        const Branching plain(nullptr, is_dynamic);
        const auto optimizer = torch_optimizer(kind, plain.params);
        std::vector<std::vector<at::Tensor>> expected(kSteps);
        for (int step = 0; step < kSteps; ++step) {
          optimizer->zero_grad(/*set_to_none=*/true);
          for (int rank = 0; rank < ranks; ++rank) {
            (plain.loss(step, rank) / ranks).backward();
          }
          optimizer->step();
          for (const at::Tensor& param : plain.params) {
            expected[static_cast<std::size_t>(step)].push_back(param.detach().clone());
          }
        }
        for (const Placed& placed : places) {
          SCOPED_TRACE(placed.name);
          Config config = semantics_config(kind);
          for (const auto& [name, value] : placed.options) {
            config.apply_flag(name + "=" + value);
          }
          with_engines(ranks, config, [&](Engine& engine, comm::Group& group) {
            const Branching sharded(&engine, is_dynamic);
            for (int step = 0; step < kSteps; ++step) {
              train_step(engine, sharded.loss(step, group.rank()));
              for (int id = 0; id < engine.num_params(); ++id) {
                const at::Tensor& right =
                    expected[static_cast<std::size_t>(step)][static_cast<std::size_t>(id)];
                EXPECT_TRUE(at::allclose(engine.full_value(id), right, 1e-5, 1e-6))
                    << "step " << step << ", parameter " << engine.param(id).name();
              }
            }
          });
        }
      }
    }
  }
}

struct NormedModuleImpl : torch::nn::Module {
  NormedModuleImpl() {
    weight = register_parameter("weight", input(6, 6, 3));
    scale = register_buffer("scale", at::full({6}, 0.7));
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight) * scale; }
  at::Tensor weight;
  at::Tensor scale;
  at::Tensor count;
};

TEST(OldGraphs, AreRefusedWhereTorchRefusesThem) {
  for (const int ranks : {1, 2}) {
    with_engines(ranks, [](Engine& engine, comm::Group&) {
      auto first = engine.unit("first", affine(5, 6, 1));
      auto second = engine.unit("second", affine(6, 2, 2));
      const auto loss = [&](int seed) { return second(at::gelu(first(input(4, 5, seed)))).sum(); };
      const at::Tensor now = loss(0);
      const at::Tensor later = loss(1);
      train_step(engine, now);
      EXPECT_SAYS("a graph from before an update", engine.backward(later));
      engine.zero_grad();
      // The gradient of a first layer needs no weight, and torch does not mind.
      const at::Tensor old = first(input(4, 5, 0)).sum();
      train_step(engine, loss(2));
      train_step(engine, old);
    });
  }
}

TEST(OwnLeaves, GetTheWeightTimesTheirGradient) {
  for (const int ranks : {1, 2}) {
    with_engines(ranks, [](Engine& engine, comm::Group&) {
      auto unit = engine.unit("unit", affine(5, 6, 1));
      for (const double weight : {12.0, 1.0, 0.75}) {
        const at::Tensor prompt = input(4, 5, 3).set_requires_grad(true);
        engine.backward(unit(prompt).sum(), weight);
        const at::Tensor plain = prompt.detach().clone().set_requires_grad(true);
        (weight * affine(5, 6, 1)->forward(plain).sum()).backward();
        EXPECT_TRUE(at::allclose(prompt.grad(), plain.grad(), 1e-5, 1e-6)) << weight;
        engine.zero_grad();
      }
    });
  }
}

TEST(Exceptions, InALaterForwardOrAnEvaluationKeepWhatMicroBatchesGave) {
  struct MaybeImpl : torch::nn::Module {
    MaybeImpl() { weight = register_parameter("weight", input(6, 6, 1)); }
    at::Tensor forward(const at::Tensor& x) {
      if (throws) {
        throw std::runtime_error("out of cheese");
      }
      return at::linear(x, weight);
    }
    bool throws = false;
    at::Tensor weight;
  };
  for (const int ranks : {1, 2}) {
    std::vector<at::Tensor> values;
    for (const bool disturbed : {false, true}) {
      with_engines(ranks, [&](Engine& engine, comm::Group& group) {
        auto unit = engine.unit("unit", std::make_shared<MaybeImpl>());
        for (int micro = 0; micro < 3; ++micro) {
          if (disturbed && micro > 0) {
            unit->throws = true;
            if (micro == 1) {
              EXPECT_SAYS("out of cheese", unit(input(4, 6, 9)));
            } else {
              const at::NoGradGuard no_grad;
              EXPECT_SAYS("out of cheese", unit(input(4, 6, 9)));
            }
            unit->throws = false;
          }
          engine.backward(unit(input(4, 6, micro)).pow(2).mean());
        }
        const StepResult result = engine.step();
        EXPECT_EQ(result.weight, 3.0 * group.size());
        const at::Tensor value = engine.full_value(0);
        if (group.rank() == 0) {
          values.push_back(value);
        }
      });
    }
    EXPECT_TRUE(at::equal(values[0], values[1])) << ranks << " ranks";
  }
}

TEST(Precision, ConvertsModulesAsToDoesAndMastersKeepTheValuesOfBefore) {
  for (const std::string name : {"bf16", "fp16"}) {
    for (const int ranks : {1, 2}) {
      const at::ScalarType type = name == "bf16" ? at::kBFloat16 : at::kHalf;
      Config config = quiet_config();
      config.set("precision", name);
      with_engines(ranks, config, [&](Engine& engine, comm::Group&) {
        auto module = std::make_shared<NormedModuleImpl>();
        const at::Tensor before = module->weight.detach().clone();
        auto unit = engine.unit("unit", module);
        EXPECT_EQ(module->weight.scalar_type(), type);
        EXPECT_EQ(module->scale.scalar_type(), type);
        EXPECT_EQ(module->count.scalar_type(), at::kLong);
        EXPECT_TRUE(at::equal(engine.full_value(0), before.to(type)));
        engine.backward(unit(input(4, 6, 0).to(type)).to(at::kFloat).sum());
        const int id = id_of(engine, "unit.weight");
        const shard::ElementRange range = engine.param(id).range();
        const std::span<float> master = engine.optimizer().state(id, "master");
        for (std::int64_t i = 0; i < range.numel; ++i) {
          EXPECT_EQ(master[static_cast<std::size_t>(i)],
                    before.view({-1})[range.begin + i].item<float>());
        }
        EXPECT_EQ(engine.step().loss_scale, name == "fp16" ? 65536.0 : 1.0);
      });
    }
  }
  // A type of a module's own, and no wish: it stays, and so does the scale that it needs.
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto module = std::make_shared<NormedModuleImpl>();
    module->to(at::kHalf);
    auto unit = engine.unit("unit", module);
    engine.backward(unit(input(4, 6, 0).to(at::kHalf)).to(at::kFloat).sum());
    EXPECT_EQ(engine.step().loss_scale, 65536.0);
  });
}

// Values from before the conversion count until somebody writes others.
TEST(Precision, AnEditBeforeTheFirstStepReachesTheMaster) {
  for (const int ranks : {1, 2}) {
    Config config = quiet_config();
    config.set("precision", std::string("bf16"));
    with_engines(ranks, config, [&](Engine& engine, comm::Group&) {
      auto unit = engine.unit("unit", affine(5, 6, 1));
      change(engine, {unit->weight}, 0, [&] { unit->weight.fill_(3); });
      engine.backward(unit(input(4, 5, 0).to(at::kBFloat16)).to(at::kFloat).sum());
      const int id = id_of(engine, "unit.weight");
      const std::span<float> master = engine.optimizer().state(id, "master");
      for (std::int64_t i = 0; i < engine.param(id).range().numel; ++i) {
        EXPECT_EQ(master[static_cast<std::size_t>(i)], 3.0F);
      }
      engine.step();
    });
  }
}

TEST(Precision, WhatIsUnfrozenBeforeTheFirstForwardKeepsTheValuesOfBefore) {
  Config config = quiet_config();
  config.set("precision", std::string("bf16"));
  with_engines(1, config, [&](Engine& engine, comm::Group&) {
    auto module = affine(5, 6, 1);
    const at::Tensor before = module->weight.detach().clone();
    module->weight.set_requires_grad(false);
    auto unit = engine.unit("unit", module);
    std::size_t bytes = 0;
    for (int id = 0; id < engine.num_params(); ++id) {
      bytes += static_cast<std::size_t>(engine.param(id).layout().shard_numel()) * sizeof(float);
    }
    EXPECT_EQ(engine.runtime().ledger().current_bytes(Tier::kHost, Role::kOptimizer), bytes);
    module->weight.set_requires_grad(true);
    engine.backward(unit(input(4, 5, 0).to(at::kBFloat16)).to(at::kFloat).sum());
    const int id = id_of(engine, "unit.weight");
    EXPECT_EQ(engine.optimizer().state(id, "master")[7], before.view({-1})[7].item<float>());
  });
}

TEST(Hooks, OnALeafThatIsUsedAgainAndAgainDoNotAccumulate) {
  with_engines(1, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const at::Tensor prompt = input(4, 5, 3).set_requires_grad(true);
    for (int i = 0; i < 50; ++i) {
      train_step(engine, unit(prompt).sum());
    }
    const auto& meta = *torch::autograd::impl::get_autograd_meta(prompt);
    EXPECT_LE(meta.cpp_hooks_list_ ? meta.cpp_hooks_list_->size() : 0U, 1U);
  });
}

TEST(Groups, OfAnotherRuntimeServeASecondOne) {
  for (const int ranks : {1, 2}) {
    comm::run_ranks(ranks, [](comm::Group& group) {
      Runtime first(quiet_config(), group, {-1, 1});
      Runtime second(quiet_config(), first.group(), {-1, 1});
      for (Runtime* runtime : {&first, &second}) {
        Engine engine(*runtime);
        auto unit = engine.unit("unit", affine(5, 6, 1));
        train_step(engine, unit(input(4, 5, 0)).sum());
      }
    });
  }
}

TEST(Groups, OfARuntimeThatIsAloneServeASecondOne) {
  Runtime first(quiet_config(), {-1, 1});
  Runtime second(quiet_config(), first.group(), {-1, 1});
  Engine engine(second);
  auto unit = engine.unit("unit", affine(5, 6, 1));
  train_step(engine, unit(input(4, 5, 0)).sum());
}

TEST(SaveParameters, ToAPathThatCannotBeWrittenIsRefusedByAllRanksAndNothingIsLost) {
  const TemporaryDirectory folder;
  with_engines(3, [&](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    const std::string bad = (folder.path() / "no/such/folder/model.safetensors").string();
    EXPECT_SAYS(group.rank() == 0 ? "no/such/folder" : "rank 0 cannot",
                engine.save_parameters(bad));
    train_step(engine, unit(input(4, 5, 0)).sum());
    const std::string good = (folder.path() / "model.safetensors").string();
    engine.save_parameters(good);
    EXPECT_TRUE(std::filesystem::exists(good));
  });
}

TEST(Units, ThatOneRankCannotMakeAreRefusedByAll) {
  with_engines(3, [](Engine& engine, comm::Group& group) {
    auto module = affine(5, 6, 1);
    if (group.rank() == 1) {
      module->weight.mutable_grad() = at::zeros({6, 5});
    }
    EXPECT_SAYS(group.rank() == 1 ? "has a gradient already" : "rank 1 cannot",
                engine.unit("unit", module));
    auto unit = engine.unit("unit", affine(5, 6, 1));
    train_step(engine, unit(input(4, 5, 0)).sum());
  });
}

// All is held by each rank, so no gather tells one rank from another.
TEST(Exceptions, ThatOneRankCatchesAreNamedAtTheNextStep) {
  Config config = quiet_config();
  config.set("persist.param_bytes", "1MiB");
  const auto failures = failures_of(2, config, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    for (int step = 0; step < 4; ++step) {
      if (group.rank() == 1 && step == 1) {
        EXPECT_ANY_THROW(unit(input(4, 4, 0)));
        continue;
      }
      train_step(engine, unit(input(4, 5, step)).sum());
    }
  });
  ASSERT_TRUE(failures[0] && failures[1]);
  EXPECT_SAYS("rank 1", std::rethrow_exception(failures[0]));
  EXPECT_SAYS("given up on this rank because of an exception, the last in",
              std::rethrow_exception(failures[0]));
}

}  // namespace
}  // namespace tessera::testing
