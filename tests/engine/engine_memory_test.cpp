// Bytes: what is held in full, what a rank holds, and what building a model takes.
#include <algorithm>

#include <gtest/gtest.h>

#include "models/gpt.h"
#include "tessera/device/host_memory.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"
#include "testing/thread_backend.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/late_device.h"
#include "tests/engine/training_run.h"

namespace tessera::testing {
namespace {

// Bytes of the largest unit with its padding, over `ranks`.
std::int64_t largest_unit_bytes(const models::GptOptions& model, int ranks) {
  // A unit has at most 12 parameters; each is padded by less than 16 bytes per rank.
  return models::gpt_size(model).largest_unit * 4 + std::int64_t{12} * 16 * ranks;
}

// Large blocks are whole pages.
std::size_t taken_bytes(std::size_t bytes) {
  return bytes < device::kPagesFromBytes ? bytes : (bytes + 4095) / 4096 * 4096;
}

TEST(FullBytes, StayWithinTheLiveLimitPlusOneUnit) {
  for (const int ranks : {2, 3}) {
    for (const char* limit : {"0", "300KiB", "800KiB", "100MiB"}) {
      RunSettings settings;
      settings.steps = 4;
      settings.ranks = ranks;
      settings.batch = 6;
      settings.options = {{"live.limit_bytes", limit}, {"persist.param_bytes", "1KiB"}};
      const RunOutcome run = train(settings);
      const std::int64_t live = config_of(settings).get_bytes("live.limit_bytes");
      for (const EngineStats& step : run.stats) {
        EXPECT_LE(step.gathers.full_bytes_peak, live + largest_unit_bytes(settings.model, ranks))
            << "limit " << limit << ", " << ranks << " ranks";
        EXPECT_GT(step.gathers.full_bytes_peak, 0);
      }
    }
  }
}

// Half of its parameters never get a gradient.
struct HalfUsedImpl : torch::nn::Module {
  explicit HalfUsedImpl(int seed) {
    used = register_parameter("used", input(16, 16, seed) * 0.3);
    unused = register_parameter("unused", input(16, 16, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x, used)); }
  at::Tensor used;
  at::Tensor unused;
};

TEST(FullBytes, StayWithinTheLimitThoughSomeGradientsNeverCome) {
  constexpr int kUnits = 8;
  constexpr std::int64_t kUnitBytes = 2 * 16 * 16 * 4;  // divides by 2 ranks x 16 bytes
  for (const bool recompute : {false, true}) {
    Config config = quiet_config();
    config.apply_flag("live.limit_bytes=0");
    config.apply_flag("persist.param_bytes=0");
    with_engines(2, config, [&](Engine& engine, comm::Group&) {
      std::vector<Unit<HalfUsedImpl>> units;
      for (int i = 0; i < kUnits; ++i) {
        units.push_back(engine.unit("unit" + std::to_string(i), std::make_shared<HalfUsedImpl>(i),
                                    {.recompute = recompute && i % 2 == 1}));
      }
      for (int step = 0; step < 3; ++step) {
        at::Tensor x = input(4, 16, 0);
        for (const auto& unit : units) {
          x = x + unit(x);
        }
        train_step(engine, x.pow(2).mean());
        EXPECT_LE(engine.take_stats().gathers.full_bytes_peak, kUnitBytes) << "step " << step;
      }
    });
  }
}

TEST(WireBytes, AreThoseOfOneGatherAndOneReductionWhereEverythingFits) {
  RunSettings settings;
  settings.steps = 3;
  settings.ranks = 2;
  settings.batch = 4;
  const RunOutcome run = train(settings);
  const std::int64_t model_bytes = models::gpt_size(settings.model).num_params * 4;
  const EngineStats& last = run.stats.back();
  // Sizes of the preset divide by 2 ranks x 16 bytes, so there is no padding.
  EXPECT_EQ(last.gathered_wire_bytes, static_cast<std::uint64_t>(model_bytes / 2));
  EXPECT_EQ(last.reduced_wire_bytes, static_cast<std::uint64_t>(model_bytes / 2));
}

TEST(RankBytes, EqualTheClosedForm) {
  for (const int ranks : {1, 2, 3}) {
    comm::run_ranks(ranks, [&](comm::Group& group) {
      RunSettings settings;
      Runtime runtime(config_of(settings), group, {-1, 1});
      Engine engine(runtime);
      models::Gpt model(settings.model, engine, settings.seed);
      engine.optimizer();
      std::size_t shard_bytes = 0;
      std::size_t moment_bytes = 0;
      for (int id = 0; id < engine.num_params(); ++id) {
        const std::int64_t numel = engine.param(id).layout().numel();
        // ceil(numel / ranks), rounded up to 4 elements of fp32.
        const std::int64_t piece = ((numel + ranks - 1) / ranks + 3) / 4 * 4;
        shard_bytes += taken_bytes(static_cast<std::size_t>(piece) * 4);
        // Two moments; the fp32 shard is its own master.
        moment_bytes += taken_bytes(static_cast<std::size_t>(piece) * 8);
      }
      const Tier tier = Tier::kDevice;
      EXPECT_EQ(runtime.ledger().current_bytes(tier, Role::kShard), shard_bytes);
      EXPECT_EQ(runtime.ledger().current_bytes(tier, Role::kOptimizer), moment_bytes);
    });
  }
}

TEST(Building, NeverHoldsMoreThanOneUnitInFull) {
  constexpr int kRanks = 4;
  comm::run_ranks(kRanks, [&](comm::Group& group) {
    RunSettings settings;
    const models::GptOptions big = models::gpt_preset("gpt2-124m");
    Runtime runtime(config_of(settings), group, {-1, 1});
    Engine engine(runtime);
    models::Gpt model(big, engine, settings.seed);
    const Tier tier = Tier::kDevice;
    EXPECT_LE(runtime.ledger().peak_bytes(tier, Role::kFull),
              static_cast<std::size_t>(models::gpt_size(big).largest_unit) * 4);
    EXPECT_GT(runtime.ledger().peak_bytes(tier, Role::kFull), 0U);
    EXPECT_EQ(runtime.ledger().current_bytes(tier, Role::kFull), 0U);
  });
}

// Everything lives on the device, whose update runs on beside the next forward.
TEST(GradientBytes, GoWhenTheNextForwardIsBehindTheUpdateAndNotOnlyInTheNextBackward) {
  constexpr std::int64_t kWidth = 256;
  constexpr std::size_t kGradientBytes = kWidth * kWidth * 4;
  const RuntimeOptions options = on_late_device();
  Config config = adam_config(1e-3);
  config.apply_flag("place.parameters=device");
  config.apply_flag("place.optimizer=device");
  Runtime runtime(config, options);
  const auto held = [&] { return runtime.ledger().current_bytes(Tier::kDevice, Role::kGradient); };
  Engine engine(runtime);
  auto first = engine.unit("first", affine(kWidth, kWidth, 1));
  auto second = engine.unit("second", affine(kWidth, kWidth, 2));
  const at::Tensor x = input(4, kWidth, 0);
  for (int step = 0; step < 3; ++step) {
    train_step(engine, second(first(x)).pow(2).mean());
    EXPECT_GE(held(), 2 * kGradientBytes) << "step " << step;
    const at::NoGradGuard no_grad;
    second(first(x));
    for (std::size_t kind = 0; kind < device::kNumStreams; ++kind) {
      runtime.device().stream(static_cast<device::StreamKind>(kind)).record().wait();
    }
    second(first(x));  // looks for what is done by now
    EXPECT_EQ(held(), 0U) << "step " << step;
  }
}

// Giving memory back to a device waits for all of its work.
TEST(DeviceMemory, IsNeitherTakenNorGivenBackInAStepOfShardsInHostMemory) {
  for (const int ranks : {1, 2}) {
    comm::run_ranks(ranks, [](comm::Group& group) {
      const RuntimeOptions options = on_late_device();
      Config config = adam_config(1e-3);
      config.apply_flag("place.parameters=host");
      config.apply_flag("place.optimizer=host");
      config.apply_flag("persist.param_bytes=0");
      Runtime runtime(config, group, options);
      Engine engine(runtime);
      auto unit = engine.unit("unit", affine(64, 64, 1));
      const at::Tensor x = input(4, 64, 0);
      for (int step = 0; step < 4; ++step) {
        train_step(engine, unit(x).pow(2).mean());
        for (std::size_t role = 0; step > 1 && role < kNumRoles; ++role) {
          EXPECT_EQ(runtime.ledger().peak_bytes(Tier::kDevice, static_cast<Role>(role)),
                    runtime.ledger().current_bytes(Tier::kDevice, static_cast<Role>(role)))
              << to_string(static_cast<Role>(role)) << " in step " << step;
        }
        engine.zero_grad();  // the update ends: gradients that one rank adopts go
        runtime.ledger().reset_peaks();
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
