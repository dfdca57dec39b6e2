// Updates during backward ([Note: updates during backward] in engine/early_updates.h): not a bit
// differs from updates behind it, they do start early, and nothing but step() may follow.
#include <stdexcept>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/engine/messages.h"
#include "tests/engine/run_options.h"
#include "tests/engine/small_modules.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

struct EarlyCase {
  std::string name;
  int accumulate = 1;
  std::string kind = "adamw";
  DType dtype = DType::kFloat32;
  bool tied = false;
  bool recomputed = false;
  int frozen = 0;
};

std::vector<EarlyCase> early_cases() {
  return {{"plain"},
          {"accumulated", 3},
          {"sgd", 1, "sgd"},
          {"bf16", 1, "adamw", DType::kBFloat16},
          {"bf16_accumulated", 3, "adamw", DType::kBFloat16},
          {"tied", 1, "adamw", DType::kFloat32, true},
          {"recomputed", 1, "adamw", DType::kFloat32, false, true},
          {"frozen", 1, "adamw", DType::kFloat32, false, false, 1},
          {"everything", 3, "sgd", DType::kFloat32, true, true}};
}

// Large enough that most parameters are not small ones, which never leave the device.
RunSettings early_settings(const EarlyCase& each) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = each.dtype;
  settings.model.width = each.dtype == DType::kFloat32 ? 160 : 208;
  settings.model.vocabulary = 661;
  settings.model.sequence = 8;  // products of low precision are slow on most CPUs
  settings.model.tie_head = each.tied;
  settings.model.recompute = each.recomputed;
  settings.model.freeze = each.frozen;
  settings.steps = 3;
  settings.batch = each.accumulate;
  settings.accumulate = each.accumulate;
  settings.data = "random";
  settings.options = {{"optim.kind", each.kind},
                      {"grad.clip_norm", "0"},
                      {"grad.skip_nonfinite", "false"},
                      {"batch.accumulate", std::to_string(each.accumulate)}};
  if (each.kind == "sgd") {
    settings.options.emplace_back("optim.momentum", "0.9");
  }
  return settings;
}

// Of a device whose memory is the host's.
std::vector<Placed> early_placements(const DiskDirectory& directory) {
  const Options io = nvme_in(directory);
  const Options states = joined({{"place.optimizer", "nvme"}}, io);
  const Options all = joined({{"place.parameters", "nvme"}}, states);
  return {
      {"resident", {}},
      {"host", {{"place.parameters", "host"}, {"place.optimizer", "host"}}},
      {"states on NVMe", states},
      {"states on NVMe, small sub-groups", joined({{"optim.sub_group_bytes", "64KiB"}}, states)},
      {"states on NVMe, one buffer",
       joined({{"optim.sub_group_bytes", "64KiB"}, {"nvme.optimizer_buffers", "1"}}, states)},
      {"NVMe", all},
      {"mixed", joined({{"place.parameters_host_bytes", "400KiB"}}, all)},
  };
}

// Of one with memory of its own.
std::vector<Placed> early_own_memory_placements(const DiskDirectory& directory) {
  const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
  return {
      {"nothing planned", {}},
      {"device", {{"place.parameters", "device"}, {"place.optimizer", "device"}}},
      {"all by the processor", joined({{"optim.cpu_share", "1"}}, host)},
      {"all by the device, in small pieces",
       joined({{"optim.cpu_share", "0"}, {"optim.sub_group_bytes", "64KiB"}}, host)},
      {"half by each", joined({{"optim.cpu_share", "0.5"}}, host)},
      {"optimizer, half by each",
       {{"place.parameters", "device"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
      {"optimizer on NVMe",
       joined({{"place.parameters", "host"}, {"place.optimizer", "nvme"}}, nvme_in(directory))},
  };
}

RunOutcome train_late(RunSettings settings) {
  settings.options.emplace_back("optim.update_in_backward", "false");
  RunOutcome late = train(settings);
  for (const EngineStats& stats : late.stats) {
    EXPECT_EQ(stats.early_updates, 0U);
  }
  return late;
}

void expect_bits_of_late_updates(RunSettings settings, const std::vector<Placed>& placements,
                                 const RunOutcome& late) {
  const Options common = settings.options;
  for (const Placed& placed : placements) {
    settings.options = joined(common, placed.options);
    const RunOutcome run = train(settings);
    EXPECT_TRUE(same_bits(run, late)) << placed.name << ": " << difference(run, late).describe();
    EXPECT_EQ(run.states.size(), run.params.size());
    std::uint64_t num_trained = 0;
    for (const at::Tensor& states : run.states) {
      num_trained += states.abs().sum().item<double>() > 0 ? 1 : 0;
    }
    for (std::size_t step = 0; step < run.stats.size(); ++step) {
      // All of them, where nothing is stored but states.
      if (placed.name != "NVMe" && placed.name != "mixed") {
        EXPECT_EQ(run.stats[step].early_updates, num_trained) << placed.name << ", step " << step;
      } else {
        EXPECT_LT(run.stats[step].early_updates, num_trained) << placed.name << ", step " << step;
      }
    }
  }
}

std::string early_name(const ::testing::TestParamInfo<std::size_t>& info) {
  return early_cases()[info.param].name;
}

class EarlyBits : public ::testing::TestWithParam<std::size_t> {};

TEST_P(EarlyBits, AreThoseOfLateUpdatesWhereverShardsLive) {
  const DiskDirectory directory;
  const EarlyCase each = early_cases()[GetParam()];
  RunSettings settings = early_settings(each);
  const RunOutcome late = train_late(settings);
  expect_bits_of_late_updates(settings,
                              places_of_case(early_placements(directory), GetParam(),
                                             {"resident", "states on NVMe, one buffer"}),
                              late);
  if (each.frozen == 0) {  // no room is planned there for states of what is frozen
    settings.device = RunDevice::kLate;
    expect_bits_of_late_updates(
        settings,
        places_of_case(early_own_memory_placements(directory), GetParam(), {"half by each"}), late);
  }
  settings.device = RunDevice::kCpu;
  settings.ranks = 0;
  EXPECT_TRUE(same_bits(train(settings), late)) << "unsharded";
}

INSTANTIATE_TEST_SUITE_P(Of, EarlyBits, ::testing::Range(std::size_t{0}, early_cases().size()),
                         early_name);

class EarlyBitsOnCuda : public ::testing::TestWithParam<std::size_t> {};

TEST_P(EarlyBitsOnCuda, AreThoseOfLateUpdatesWhereverShardsLive) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  const EarlyCase each = early_cases()[GetParam()];
  if (each.frozen > 0) {
    GTEST_SKIP() << "no room is planned for states of what is frozen";
  }
  const DiskDirectory directory;
  RunSettings settings = early_settings(each);
  settings.device = RunDevice::kCuda;
  expect_bits_of_late_updates(settings, early_own_memory_placements(directory),
                              train_late(settings));
}

INSTANTIATE_TEST_SUITE_P(Of, EarlyBitsOnCuda,
                         ::testing::Range(std::size_t{0}, early_cases().size()), early_name);

TEST(EarlyUpdatesOfRanks, StartBehindBackward) {
  RunSettings settings = early_settings({"ranks"});
  settings.ranks = 2;
  settings.batch = 2;
  const RunOutcome late = train_late(settings);
  const RunOutcome run = train(settings);
  EXPECT_TRUE(same_bits(run, late));
  for (const EngineStats& stats : run.stats) {
    EXPECT_EQ(stats.early_updates, 0U);
  }
}

Config early_config(int accumulate = 1) {
  Config config = adam_config(0.1);
  config.set("grad.skip_nonfinite", false);
  config.set("batch.accumulate", static_cast<std::int64_t>(accumulate));
  return config;
}

// Three layers; `at_first` runs in backward when the gradient of the first one's output has come.
struct Chain {
  explicit Chain(Engine& engine)
      : engine(engine),
        first(engine.unit("first", affine(5, 6, 1))),
        second(engine.unit("second", affine(6, 6, 2))),
        last(engine.unit("last", affine(6, 2, 3))) {}
  at::Tensor loss(int seed = 0) {
    const at::Tensor x = first(input(4, 5, seed));
    if (at_first) {
      x.register_hook([this](const at::Tensor&) { at_first(); });
    }
    const at::Tensor y = last(at::gelu(second(at::gelu(x))));
    if (at_last) {
      y.register_hook([this](const at::Tensor&) { at_last(); });
    }
    return y.pow(2).mean();
  }
  std::uint64_t version(const std::string& name) {
    return engine.param(id_of(engine, name)).version();
  }
  Engine& engine;
  Unit<AffineImpl> first;
  Unit<AffineImpl> second;
  Unit<AffineImpl> last;
  std::function<void()> at_first;
  std::function<void()> at_last;
};

void with_chain(const Config& config, const std::function<void(Chain&)>& body) {
  with_engines(1, config, [&](Engine& engine, comm::Group&) {
    Chain chain(engine);
    body(chain);
  });
}

TEST(EarlyUpdates, OfLaterLayersAreThereBeforeTheFirstGradientComes) {
  with_chain(early_config(), [](Chain& chain) {
    for (std::uint64_t step = 1; step <= 2; ++step) {
      int num_seen = 0;
      chain.at_first = [&] {
        ++num_seen;
        EXPECT_EQ(chain.version("last.weight"), step);
        EXPECT_EQ(chain.version("last.bias"), step);
        EXPECT_EQ(chain.version("second.weight"), step);
        EXPECT_EQ(chain.version("first.weight"), step - 1);
      };
      chain.engine.backward(chain.loss());
      EXPECT_EQ(num_seen, 1);
      EXPECT_EQ(chain.version("first.weight"), step);
      chain.engine.step();
      EXPECT_EQ(chain.engine.take_stats().early_updates, 6U);
    }
  });
}

TEST(EarlyUpdates, WaitForTheLastMicroBatch) {
  with_chain(early_config(2), [](Chain& chain) {
    chain.engine.backward(chain.loss(0));
    EXPECT_EQ(chain.version("last.weight"), 0U);
    chain.engine.backward(chain.loss(1));
    EXPECT_EQ(chain.version("last.weight"), 1U);
    chain.engine.step();
    // A step with fewer of them than were announced is made late.
    chain.engine.backward(chain.loss(2));
    EXPECT_EQ(chain.version("last.weight"), 1U);
    chain.engine.step();
    EXPECT_EQ(chain.version("last.weight"), 2U);
  });
}

std::vector<at::Tensor> values_after(const Config& config,
                                     const std::function<at::Tensor(Engine&, int step)>& loss) {
  std::vector<at::Tensor> values;
  with_engines(1, config, [&](Engine& engine, comm::Group&) {
    for (int step = 0; step < 3; ++step) {
      engine.backward(loss(engine, step));
      engine.step();
    }
    for (int id = 0; id < engine.num_params(); ++id) {
      values.push_back(engine.full_value(id));
    }
  });
  return values;
}

void expect_late_values(const std::function<std::function<at::Tensor(Engine&, int)>()>& model) {
  Config late = early_config();
  late.set("optim.update_in_backward", false);
  const auto expected = values_after(late, model());
  const auto values = values_after(early_config(), model());
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(at::equal(values[i], expected[i])) << "parameter " << i;
  }
}

// The gradient of the last layer's weight is complete long before the unit in front has passed its
// own back through a detached copy of that weight.
TEST(EarlyUpdates, LeaveAWeightAloneThatIsReadAgainWithoutAGradient) {
  using Mix = std::function<at::Tensor(const at::Tensor&)>;
  struct Model {
    std::unique_ptr<Unit<AffineImpl>> first;
    std::unique_ptr<Unit<AffineImpl>> last;
    std::unique_ptr<Unit<FunctionModule<Mix>>> mix;
  };
  expect_late_values([] {
    auto model = std::make_shared<Model>();
    return [model](Engine& engine, int step) {
      if (!model->first) {
        model->first = std::make_unique<Unit<AffineImpl>>(engine.unit("first", affine(5, 6, 1)));
        model->last = std::make_unique<Unit<AffineImpl>>(engine.unit("last", affine(6, 6, 2)));
        const at::Tensor weight = (*model->last)->weight;
        const Mix mix = [weight](const at::Tensor& x) { return at::linear(x, weight.detach()); };
        model->mix =
            std::make_unique<Unit<FunctionModule<Mix>>>(engine.function("mix", {weight}, mix));
      }
      const at::Tensor x = (*model->mix)(at::gelu((*model->first)(input(4, 5, step))));
      return (*model->last)(at::gelu(x)).pow(2).mean();
    };
  });
}

TEST(EarlyUpdates, AreFollowedByStepAlone) {
  with_chain(early_config(), [](Chain& chain) {
    Engine& engine = chain.engine;
    const at::Tensor second = chain.loss(1);
    engine.backward(chain.loss(0));
    const int id = id_of(engine, "first.weight");
    constexpr const char* kWhy = "parameters have been updated during the last backward";
    EXPECT_SAYS(kWhy, engine.zero_grad());
    EXPECT_SAYS("call step() first", engine.zero_grad());
    EXPECT_SAYS("zero_grad() before step()", engine.zero_grad());
    EXPECT_SAYS(kWhy, engine.backward(second));
    EXPECT_SAYS(kWhy, second.backward());
    EXPECT_SAYS(kWhy, chain.loss(2));
    EXPECT_SAYS(kWhy, std::ignore = engine.gathered_ids({id}));
    EXPECT_SAYS(kWhy, engine.set_trainable(engine.tensor(id), false));
    const double loss = engine.step().loss;
    EXPECT_GT(loss, 0);
    EXPECT_EQ(engine.num_steps(), 1);
    engine.backward(chain.loss(2));
    engine.step();
    EXPECT_EQ(chain.version("first.weight"), 2U);
  });
}

TEST(EarlyUpdates, OfABackwardThatFailsLeaveParametersOfTwoAges) {
  with_chain(early_config(), [](Chain& chain) {
    Engine& engine = chain.engine;
    chain.at_last = [] { throw std::runtime_error("the user's hook failed"); };
    EXPECT_SAYS("the user's hook failed", engine.backward(chain.loss()));
    chain.at_last = nullptr;
    engine.zero_grad();
    engine.backward(chain.loss());  // nothing had been updated: the engine goes on
    engine.step();
    chain.at_first = [] { throw std::runtime_error("the user's hook failed"); };
    constexpr const char* kWhy =
        "the backward failed after updates of 4 parameters had been started: parameters are of two "
        "ages";
    EXPECT_SAYS(kWhy, engine.backward(chain.loss()));
    chain.at_first = nullptr;
    EXPECT_SAYS(kWhy, chain.loss());
    EXPECT_SAYS("The cause: the user's hook failed", engine.step());
    EXPECT_SAYS(kWhy, engine.zero_grad());
  });
}

TEST(EarlyUpdates, EndWithTheirEngine) {
  with_chain(early_config(), [](Chain& chain) { chain.engine.backward(chain.loss()); });
  RunSettings settings = early_settings({"gone"});
  const DiskDirectory directory;
  settings.options = joined(settings.options, early_placements(directory)[2].options);
  comm::run_ranks(1, [&](comm::Group& group) {
    Runtime runtime(config_of(settings), group, {-1, 1, 0});
    Engine engine(runtime);
    models::Gpt model(settings.model, engine, settings.seed);
    const at::Tensor ids = at::zeros({1, 8}, at::kLong);
    engine.backward(model.loss(ids, ids));
  });
}

}  // namespace
}  // namespace tessera::testing
