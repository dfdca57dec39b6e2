// Units that only some ranks use, ranks that run out of data, and leaves.
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include "tests/engine/engine_fixture.h"
#include "tests/engine/expert_training.h"
#include "tests/engine/late_device.h"

namespace tessera::testing {
namespace {

Config slow_config() {
  Config config = quiet_config();
  config.set("optim.lr", 0.1);
  return config;
}

void expect_experts_trained(const std::string& kind, int ranks, int steps, bool recompute) {
  ExpertRun run;
  run.kind = kind;
  run.steps = steps;
  run.recompute = recompute;
  const std::vector<at::Tensor> plain = train_plain_experts(run, ranks);
  with_engines(ranks, config_of(run), [&](Engine& engine, comm::Group&) {
    expect_experts_close(train_experts(engine, run).params, plain);
  });
}

TEST(DynamicUnits, RoutedAtRandomTrainAsTheUnshardedModel) {
  for (const std::string kind : {"sgd", "adamw"}) {
    SCOPED_TRACE(kind);
    expect_experts_trained(kind, 4, 50, false);
    for (const int ranks : {1, 2, 3}) {
      expect_experts_trained(kind, ranks, 10, false);
    }
    expect_experts_trained(kind, 2, 10, true);
  }
}

// No static unit comes after its backward: only the end of backward is left to meet at.
TEST(DynamicUnits, InFrontOfEverythingAreReducedAtTheEndOfBackward) {
  constexpr int kRanks = 3;
  const auto goes_through = [](int step, int rank) { return (step + rank) % 3 == 0; };
  const auto plain_front = affine(6, 6, 1);
  const auto plain_back = affine(6, 3, 2);
  for (int step = 0; step < 4; ++step) {
    at::Tensor loss = at::zeros({});
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor x = input(4, 6, step + rank);
      loss =
          loss +
          plain_back->forward(goes_through(step, rank) ? plain_front->forward(x) : x).pow(2).mean();
    }
    (loss / kRanks).backward();
    descend({plain_front, plain_back}, 0.1);
  }
  with_engines(kRanks, slow_config(), [&](Engine& engine, comm::Group& group) {
    UnitOptions dynamic;
    dynamic.dynamic = true;
    auto front = engine.unit("front", affine(6, 6, 1), dynamic);
    auto back = engine.unit("back", affine(6, 3, 2));
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = input(4, 6, step + group.rank());
      train_step(engine, back(goes_through(step, group.rank()) ? front(x) : x).pow(2).mean());
    }
    EXPECT_TRUE(at::allclose(engine.full_value(0), plain_front->weight, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(engine.full_value(2), plain_back->weight, 1e-4, 1e-5));
  });
}

// Ranks use one unit at different places, so that its gradients are listed twice in a backward.
TEST(DynamicUnits, TakeTheMemoryThatWasPlannedHoweverOftenTheyAreListed) {
  const std::pair<const char*, const char*> places[] = {{"device", "0"}, {"host", "1"}};
  for (const auto& [place, cpu_share] : places) {
    for (const char* accumulate : {"1", "2"}) {
      SCOPED_TRACE(std::string(place) + ", accumulate " + accumulate);
      Config config = adam_config(1e-3);
      config.apply_flag(std::string("place.parameters=") + place);
      config.apply_flag(std::string("place.optimizer=") + place);
      config.apply_flag(std::string("optim.cpu_share=") + cpu_share);
      config.apply_flag(std::string("batch.accumulate=") + accumulate);
      config.apply_flag("persist.param_bytes=0");
      config.apply_flag("precision=bf16");
      comm::run_ranks(2, [&](comm::Group& group) {
        const RuntimeOptions options = on_late_device();
        Runtime runtime(config, group, options);
        Engine engine(runtime);
        UnitOptions dynamic;
        dynamic.dynamic = true;
        auto front = engine.unit("front", affine(8, 8, 1));
        auto expert = engine.unit("expert", affine(8, 8, 2), dynamic);
        auto middle = engine.unit("middle", affine(8, 8, 3));
        auto back = engine.unit("back", affine(8, 4, 4));
        for (int step = 0; step < 3; ++step) {
          for (int micro = 0; micro < accumulate[0] - '0'; ++micro) {
            at::Tensor x = front(input(4, 8, step + group.rank()).to(at::kBFloat16));
            x = group.rank() == 0 ? expert(x) : x;
            x = middle(x);
            x = group.rank() == 1 ? expert(x) : x;
            engine.backward(back(x).to(at::kFloat).pow(2).mean());
          }
          engine.step();
        }
        engine.zero_grad();
        const planner::MemoryPlan* const plan = engine.memory_plan();
        ASSERT_NE(plan, nullptr);
        for (const Tier tier : {Tier::kDevice, Tier::kPinned}) {
          EXPECT_EQ(runtime.ledger().peak_bytes(tier, Role::kGradient),
                    static_cast<std::size_t>(plan->bytes(tier, Role::kGradient)))
              << to_string(tier);
        }
      });
    }
  }
}

TEST(DynamicUnits, NamesThatMatchNothingAreRefused) {
  Config config = slow_config();
  config.apply_flag("unit.dynamic_names=expert.*");
  with_engines(1, config, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("experts.0", affine(6, 6, 1));
    EXPECT_SAYS("unit.dynamic_names has 'expert.*'", unit(input(4, 6, 0)));
  });
}

// Rank r has data for 2 + 2r steps.
TEST(RanksWithoutData, FollowTheOthersWithWeightZero) {
  constexpr int kRanks = 3;
  const auto plain = affine(5, 6, 1);
  for (int step = 0; step < 6; ++step) {
    std::vector<at::Tensor> losses;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (step < 2 + 2 * rank) {
        losses.push_back(plain->forward(input(4, 5, step + rank)).pow(2).mean());
      }
    }
    at::stack(losses).mean().backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : plain->parameters()) {
      param.sub_(param.grad(), 0.1);
      param.mutable_grad().reset();
    }
  }
  Config config = slow_config();
  config.apply_flag("unit.uneven_data=true");
  with_engines(kRanks, config, [&](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 6, 1));
    std::vector<double> weights;
    for (int step = 0; step < 2 + 2 * group.rank(); ++step) {
      engine.backward(unit(input(4, 5, step + group.rank())).pow(2).mean());
      weights.push_back(engine.step().weight);
    }
    while (const auto result = engine.join()) {
      weights.push_back(result->weight);
    }
    EXPECT_EQ(weights, (std::vector<double>{3, 3, 2, 2, 1, 1}));
    EXPECT_TRUE(at::allclose(engine.full_value(0), plain->weight, 1e-4, 1e-5));
  });
}

// An outer unit whose inner units differ between ranks.
struct ChoiceImpl : torch::nn::Module {
  ChoiceImpl(Unit<AffineImpl> a, Unit<AffineImpl> b) : left(std::move(a)), right(std::move(b)) {}
  at::Tensor forward(const at::Tensor& x, bool goes_left) { return goes_left ? left(x) : right(x); }
  Unit<AffineImpl> left;
  Unit<AffineImpl> right;
};

TEST(Leaves, AreGatheredWholeSoThatRanksMayGoDifferentWaysInside) {
  with_engines(2, slow_config(), [](Engine& engine, comm::Group& group) {
    auto front = engine.unit("front", affine(6, 6, 0));
    auto left = engine.unit("choice.left", affine(6, 6, 1));
    auto right = engine.unit("choice.right", affine(6, 6, 2));
    auto choice = engine.unit("choice", std::make_shared<ChoiceImpl>(left, right));
    engine.set_leaf("*.left");
    engine.set_leaf(coordinator::LeafRule::type("ChoiceImpl"));
    EXPECT_EQ(engine.leaf_units(), (std::vector<std::string>{"choice.left", "choice"}));
    engine.clear_leaf("choice.left");
    EXPECT_EQ(engine.leaf_units(), (std::vector<std::string>{"choice"}));
    EXPECT_SAYS("nothing", engine.set_leaf("nothing"));
    const auto plain_left = affine(6, 6, 1);
    const auto plain_right = affine(6, 6, 2);
    const auto plain_front = affine(6, 6, 0);
    for (int step = 0; step < 3; ++step) {
      train_step(engine, choice(front(input(4, 6, step)), group.rank() == 0).pow(2).mean());
      const at::Tensor x = plain_front->forward(input(4, 6, step));
      ((plain_left->forward(x).pow(2).mean() + plain_right->forward(x).pow(2).mean()) / 2)
          .backward();
      descend({plain_left, plain_right, plain_front}, 0.1);
    }
    EXPECT_SAYS("after the first forward", engine.set_leaf("choice"));
    EXPECT_TRUE(at::allclose(engine.full_value(id_of(engine, "choice.left.weight")),
                             plain_left->weight, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(engine.full_value(id_of(engine, "choice.right.weight")),
                             plain_right->weight, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(engine.full_value(id_of(engine, "front.weight")), plain_front->weight,
                             1e-4, 1e-5));
  });
}

TEST(Leaves, OfTheConfigThatMatchNothingAreRefused) {
  Config config = slow_config();
  config.apply_flag("unit.leaf_types=NoSuchImpl");
  with_engines(1, config, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(6, 6, 1));
    EXPECT_SAYS("NoSuchImpl", unit(input(4, 6, 0)));
  });
}

}  // namespace
}  // namespace tessera::testing
