// Units that only some ranks use, ranks that run out of data, and leaves.
#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

constexpr int kExperts = 8;

// Whether `rank` sends its rows through an expert in a step; in every fifth step nobody does.
bool is_routed(int step, int rank, int expert) {
  if (step % 5 == 4) {
    return false;
  }
  const unsigned mixed = static_cast<unsigned>((step * 31 + rank) * 131 + expert) * 2654435761U;
  return (mixed >> 13) % 3 == 0;
}

// The loss of one rank in one step; `call(unit, x)` runs a unit or a plain module.
template <typename Layer>
at::Tensor loss_of(Layer& front, std::vector<Layer>& experts, Layer& back, int step, int rank) {
  const at::Tensor x = front(input(4, 6, step * 7 + rank));
  at::Tensor y = x;
  for (int expert = 0; expert < kExperts; ++expert) {
    if (is_routed(step, rank, expert)) {
      y = y + at::tanh(experts[static_cast<std::size_t>(expert)](x));
    }
  }
  return back(y).pow(2).mean();
}

Config slow_config() {
  Config config = quiet_config();
  config.set("optim.lr", 0.1);
  return config;
}

template <typename MakeLayer>
auto make_layers(const MakeLayer& make) {
  using Layer = decltype(make(std::string(), 0));
  std::vector<Layer> layers;
  for (int i = 0; i < kExperts + 2; ++i) {
    layers.push_back(make(i < kExperts    ? "experts." + std::to_string(i)
                          : i == kExperts ? std::string("front")
                                          : std::string("back"),
                          i));
  }
  return layers;
}

// `kind`: see semantics_config(). Adam's step does not depend on the size of a gradient, so a
// gradient of rounding errors alone would move a parameter by lr in either direction; there is none
// here, and a small lr keeps what differs below the tolerance.
void expect_experts_trained(const std::string& kind, int ranks, int steps, bool recompute) {
  constexpr double kLr = 0.0625;
  auto plain = make_layers(
      [](const std::string&, int seed) { return Unit<AffineImpl>(affine(6, 6, seed)); });
  std::vector<Unit<AffineImpl>> plain_experts(plain.begin(), plain.begin() + kExperts);
  std::vector<at::Tensor> plain_params;
  for (auto& unit : plain) {
    for (const at::Tensor& param : unit.module()->parameters()) {
      plain_params.push_back(param);
    }
  }
  const auto optimizer = torch_optimizer(kind, plain_params, kLr);
  for (int step = 0; step < steps; ++step) {
    at::Tensor loss = at::zeros({});
    for (int rank = 0; rank < ranks; ++rank) {
      loss = loss + loss_of(plain[kExperts], plain_experts, plain[kExperts + 1], step, rank);
    }
    optimizer->zero_grad(/*set_to_none=*/true);
    (loss / ranks).backward();
    optimizer->step();
  }
  Config config = semantics_config(kind, kLr);
  config.apply_flag("unit.dynamic_names=experts.*");
  config.apply_flag("persist.param_bytes=0");
  with_engines(ranks, config, [&](Engine& engine, comm::Group& group) {
    auto layers = make_layers([&](const std::string& name, int seed) {
      return engine.unit(name, affine(6, 6, seed), {.recompute = recompute});
    });
    std::vector<Unit<AffineImpl>> experts(layers.begin(), layers.begin() + kExperts);
    for (int step = 0; step < steps; ++step) {
      train_step(engine,
                 loss_of(layers[kExperts], experts, layers[kExperts + 1], step, group.rank()));
      const EngineStats stats = engine.take_stats();
      if (step % 5 == 4 && ranks > 1) {
        // Front and back, in forward and in backward, and nothing of the experts.
        const auto unit_bytes =
            engine.param(0).layout().full_bytes() + engine.param(1).layout().full_bytes();
        EXPECT_LE(stats.gathers.gathered_bytes, 4 * unit_bytes) << "step " << step;
      }
    }
    for (int id = 0; id < engine.num_params(); ++id) {
      EXPECT_TRUE(at::allclose(engine.full_value(id), plain_params[static_cast<std::size_t>(id)],
                               1e-4, 1e-5))
          << engine.param(id).name() << " on " << ranks << " ranks";
    }
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
