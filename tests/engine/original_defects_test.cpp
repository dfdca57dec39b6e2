// What goes wrong in DeepSpeed's ZeRO-3 and must not here: one test per defect, named by it. Of
// gathered scopes, empty and transposed parameters: gathered_test.cpp and engine_uses_test.cpp.
#include <limits>

#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include "tessera/optim/optimizer.h"
#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

// There an unused layer keeps moving by its last gradient, and the norm counts it.
TEST(OriginalDefect, AnUnusedParameterIsMovedByItsLastGradient) {
  for (const int ranks : {1, 2, 3}) {
    with_engines(ranks, [](Engine& engine, comm::Group&) {
      auto used = engine.unit("used", affine(5, 6, 1));
      auto sometimes = engine.unit("sometimes", affine(5, 6, 2));
      train_step(engine, used(input(4, 5, 0)).mean() + sometimes(input(4, 5, 0)).mean());
      const int id = id_of(engine, "sometimes.weight");
      const at::Tensor before = engine.full_value(id);
      const at::Tensor others[] = {engine.full_value(0), engine.full_value(1)};
      const StepResult result = train_step(engine, used(input(4, 5, 0)).mean());
      EXPECT_TRUE(at::equal(engine.full_value(id), before));
      double squares = 0;
      for (int i = 0; i < 2; ++i) {
        squares += (others[i] - engine.full_value(i)).pow(2).sum().item<double>();
      }
      EXPECT_NEAR(result.grad_norm, std::sqrt(squares), 1e-5);
    });
  }
}

// There bf16 does not look for overflow: NaN reaches the master weights of all ranks.
TEST(OriginalDefect, NotANumberReachesTheMasterWeightsInBf16) {
  with_engines(3, adam_config(0.1), [](Engine& engine, comm::Group& group) {
    const auto module = affine(5, 6, 1);
    module->to(at::kBFloat16);
    auto unit = engine.unit("unit", module);
    const at::Tensor x = input(4, 5, 0).to(at::kBFloat16);
    EXPECT_FALSE(train_step(engine, unit(x).pow(2).sum()).skipped);
    const at::Tensor before = engine.full_value(0);
    at::Tensor bad = x.clone();
    if (group.rank() == 1) {
      bad[0][0] = std::numeric_limits<float>::quiet_NaN();
    }
    const StepResult result = train_step(engine, unit(bad).pow(2).sum());
    EXPECT_TRUE(result.skipped);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_TRUE(at::equal(engine.full_value(0), before));
    for (const float value : engine.optimizer().state(0, "master")) {
      EXPECT_TRUE(std::isfinite(value));
    }
    for (const float value : engine.optimizer().state(0, "exp_avg")) {
      EXPECT_TRUE(std::isfinite(value));
    }
    EXPECT_FALSE(train_step(engine, unit(x).pow(2).sum()).skipped);
    EXPECT_FALSE(at::equal(engine.full_value(0), before));
  });
}

// There the limit only throttles prefetch, and look-ahead makes every layer resident.
TEST(OriginalDefect, LookAheadMakesAllLayersResident) {
  constexpr int kLayers = 8;
  constexpr std::int64_t kLayerBytes = (16 * 16 + 16) * 4;  // divides by 2 ranks x 16 bytes
  Config config = quiet_config();
  config.apply_flag("live.limit_bytes=" + std::to_string(2 * kLayerBytes));
  config.apply_flag("persist.param_bytes=0");
  config.apply_flag("live.reuse_distance_bytes=1GiB");
  with_engines(2, config, [&](Engine& engine, comm::Group&) {
    std::vector<Unit<AffineImpl>> layers;
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(engine.unit("layer" + std::to_string(i), affine(16, 16, i)));
    }
    for (int step = 0; step < 4; ++step) {
      at::Tensor x = input(4, 16, 0);
      for (const auto& layer : layers) {
        x = at::tanh(layer(x));
      }
      train_step(engine, x.pow(2).mean());
      EXPECT_LE(engine.take_stats().gathers.full_bytes_peak, 3 * kLayerBytes) << "step " << step;
    }
  });
}

// There a parameter with padding on several ranks has wrong metadata, and setters throw.
TEST(OriginalDefect, PaddingThatSpansRanksIsWrong) {
  for (const int ranks : {3, 4, 5}) {
    with_engines(ranks, [](Engine& engine, comm::Group& group) {
      auto unit = engine.unit("unit", affine(1, 5, 1));  // rank 2 and later hold padding alone
      const auto plain = affine(1, 5, 1);
      plain->forward(input(4, 1, 0)).pow(2).mean().backward();
      train_step(engine, unit(input(4, 1, 0)).pow(2).mean());
      EXPECT_TRUE(
          at::allclose(engine.full_value(0), plain->weight - plain->weight.grad(), 1e-5, 1e-6));
      change(engine, {unit->weight}, group.size() - 1, [&] { unit->weight.fill_(3); });
      EXPECT_TRUE(at::equal(engine.full_value(0), at::full({5, 1}, 3.0F)));
      const shard::Param& param = engine.param(0);
      for (std::int64_t i = param.range().numel; i < param.layout().shard_numel(); ++i) {
        EXPECT_EQ(reinterpret_cast<const float*>(param.shard())[i], 0.0F);
      }
    });
  }
}

// There decisions of an old trace decide what stays in a new one.
TEST(OriginalDefect, ReleaseDecisionsOutliveTheirTrace) {
  constexpr std::int64_t kLayerBytes = (16 * 16 + 16) * 4;
  Config config = quiet_config();
  config.apply_flag("live.limit_bytes=" + std::to_string(kLayerBytes));
  config.apply_flag("persist.param_bytes=0");
  with_engines(2, config, [&](Engine& engine, comm::Group&) {
    std::vector<Unit<AffineImpl>> layers;
    for (int i = 0; i < 6; ++i) {
      layers.push_back(engine.unit("layer" + std::to_string(i), affine(16, 16, i)));
    }
    const std::vector<std::vector<int>> orders{{0, 1, 2, 3}, {0, 1, 2, 3},       {3, 5, 0, 4},
                                               {3, 5, 0, 4}, {0, 1, 2, 3, 4, 5}, {5, 4, 3, 2}};
    for (const auto& order : orders) {
      at::Tensor x = input(4, 16, 0);
      for (const int layer : order) {
        x = at::tanh(layers[static_cast<std::size_t>(layer)](x));
      }
      train_step(engine, x.pow(2).mean());
      EXPECT_LE(engine.take_stats().gathers.full_bytes_peak, 2 * kLayerBytes);
    }
  });
}

// There a rank that runs other units than the rest computes with their weights for a whole step.
// Every use gathers here, so the first one that differs is where ranks find out.
TEST(OriginalDefect, RanksThatDivergeInTheFirstStepGoOnWithWrongWeights) {
  Config config = quiet_config();
  config.apply_flag("live.limit_bytes=0");
  config.apply_flag("persist.param_bytes=0");
  for (const int diverging_step : {0, 3}) {
    std::vector<int> finished(3, 0);
    const auto failures = failures_of(3, config, [&](Engine& engine, comm::Group& group) {
      auto left = engine.unit("left", affine(5, 6, 1));
      auto right = engine.unit("right", affine(5, 6, 2));
      for (int step = 0; step < 5; ++step) {
        const bool diverges = group.rank() == 2 && step == diverging_step;
        const at::Tensor y = diverges ? right(input(4, 5, 0)) : left(input(4, 5, 0));
        train_step(engine, y.pow(2).mean() + right(input(4, 5, 1)).mean());
        ++finished[static_cast<std::size_t>(group.rank())];
      }
    });
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      ASSERT_TRUE(failures[rank]) << "rank " << rank << " went on";
      EXPECT_LE(finished[rank], diverging_step) << "rank " << rank << " updated";
      EXPECT_SAYS("'left", std::rethrow_exception(failures[rank]));
      EXPECT_SAYS("'right", std::rethrow_exception(failures[rank]));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
