// A step whose norm, factor and update are handed over together, on the late double, where work
// ends when somebody waits for it: the bits and the counts are those of a step whose norm the host
// sees first.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/sharded_optimizer.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/optim/state_bytes.h"
#include "tests/optim/update_case.h"
#include "tests/support/no_tensor.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr double kStepLr = 1e-2;
constexpr int kNumSteps = 4;

using support::NoTensor;

struct StepShape {
  std::int64_t numel = 0;
  bool trainable = true;
  int comes_every = 1;  // its gradient comes in every so many backwards
};
const std::vector<StepShape> kStepShapes = {{9001}, {3, true, 2}, {17, false},
                                            {0},    {4099},       {5000, true, 3}};

struct StepSetting {
  DType dtype = DType::kBFloat16;
  device::LateMode mode = device::LateMode::kLazy;
  bool sums_on_the_way = true;
  int num_backwards = 1;
  double clip_norm = 0.3;
  bool skips_nonfinite = true;
  int bad_step = 0;  // whose gradients hold an infinity
  RuleOptions rule;
};

// One rank, on a device with memory of its own or, for reference, on the host.
class StepWorld {
 public:
  StepWorld(comm::Group& group, const StepSetting& test, bool own)
      : test_(test),
        device_(own ? make_own_device(test.mode) : device::make_cpu_device()),
        spans_(clock_, 0),
        params_(group.rank(), group.size(), *device_),
        kernels_(make_cpu_kernels(1)) {
    for (std::size_t i = 0; i < kStepShapes.size(); ++i) {
      shard::ParamSpec spec;
      spec.name = "p" + std::to_string(i);
      spec.numel = kStepShapes[i].numel;
      spec.dtype = test.dtype;
      spec.trainable = kStepShapes[i].trainable;
      spec.weight_decay_scale = i % 2 == 0 ? 1 : 0;
      const shard::Param& param = params_.add(spec, std::make_unique<NoTensor>());
      const auto values = *elements(param, 0.02, i + 1);
      if (param.range().numel > 0) {
        device_
            ->start_copy(param.shard(), values.data(),
                         static_cast<std::size_t>(param.range().numel) * bytes_of(test.dtype),
                         device_->stream(device::StreamKind::kWrite))
            .wait();
      }
    }
    grad::ReducerParts parts{group, *device_, params_, clock_, spans_};
    if (own) {
      set_reducer_kernels(parts, *kernels_);
      if (!test.sums_on_the_way) {
        parts.sum_of_squares = nullptr;
      }
    }
    reducer_ = std::make_unique<grad::Reducer>(
        parts, grad::ReducerOptions{std::int64_t{1} << 20, test.dtype});
    optimizer_ = std::make_unique<ShardedOptimizer>(params_, *device_, *kernels_, test.rule);
  }

  void backwards(int step) {
    for (int backward = 0; backward < test_.num_backwards; ++backward) {
      for (int id = params_.num_params() - 1; id >= 0; --id) {
        const StepShape& shape = kStepShapes[static_cast<std::size_t>(id)];
        if (!shape.trainable || (step + backward) % shape.comes_every != 0) {
          continue;
        }
        const bool is_bad = step == test_.bad_step && id == 4;
        const auto seed = static_cast<std::uint64_t>(100 * step + 10 * backward + id);
        auto values = elements(params_[id], is_bad ? 1e30 : 0.1, seed);
        if (is_bad) {
          const std::uint16_t infinity = 0x7f80;  // the upper half of fp32's
          std::memcpy(values->data() + bytes_of(test_.dtype) * 8 - 2, &infinity, 2);
        }
        reducer_->add(params_[id], {values->data(), test_.dtype, values});
      }
      reducer_->finish_backward();
    }
  }

  StepInputs inputs() const { return {3, 1024, test_.clip_norm, test_.skips_nonfinite}; }

  // As one piece of work, or as an engine does it that looks at the norm.
  void finish(bool as_one) {
    if (as_one) {
      ASSERT_TRUE(optimizer_->start_step(*reducer_, kStepLr, inputs()));
      norms.push_back(optimizer_->finish_step());
    } else {
      norms.push_back(optimizer_->sum_of_squares(*reducer_));
      const StepFactors factors =
          step_factors({norms.back(), inputs().weight, 0}, inputs().loss_scale, test_.clip_norm);
      if (factors.finite || !test_.skips_nonfinite) {
        optimizer_->start_update(*reducer_, kStepLr, factors.gradient_scale);
      }
    }
    optimizer_->wait();
    reducer_->clear();
  }

  std::vector<std::vector<std::byte>> trained() {
    std::vector<std::vector<std::byte>> all;
    for (int id = 0; id < params_.num_params(); ++id) {
      const shard::Param& param = params_[id];
      param.updated().wait();
      all.emplace_back(param.shard(), param.shard() + param.layout().shard_bytes());
      append_states(*optimizer_, test_.rule, id, all);
    }
    return all;
  }

  std::vector<std::uint64_t> versions() const {
    std::vector<std::uint64_t> out;
    for (int id = 0; id < params_.num_params(); ++id) {
      out.push_back(params_[id].version());
    }
    return out;
  }

  ShardedOptimizer& optimizer() { return *optimizer_; }
  grad::Reducer& reducer() { return *reducer_; }
  shard::ParamTable& params() { return params_; }
  device::Device& device() { return *device_; }
  std::vector<double> norms;

 private:
  static std::unique_ptr<device::Device> make_own_device(device::LateMode mode) {
    device::MockDeviceOptions options;
    options.mode = mode;
    options.own_memory = true;
    return device::make_mock_device(options);
  }

  std::shared_ptr<std::vector<std::byte>> elements(const shard::Param& param, double scale,
                                                   std::uint64_t seed) const {
    const auto numel = static_cast<std::size_t>(param.layout().numel());
    const auto floats = random_floats(numel, scale, seed);
    const auto halves = to_bfloat16s(floats);
    auto bytes = std::make_shared<std::vector<std::byte>>(numel * bytes_of(test_.dtype));
    if (numel > 0) {
      std::memcpy(bytes->data(),
                  test_.dtype == DType::kFloat32 ? static_cast<const void*>(floats.data())
                                                 : static_cast<const void*>(halves.data()),
                  bytes->size());
    }
    return bytes;
  }

  const StepSetting test_;
  std::unique_ptr<device::Device> device_;
  SteadyClock clock_;
  Spans spans_;
  shard::ParamTable params_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

// Which of two NaNs a sum keeps, and with which sign, is the compiler's choice.
std::vector<double> with_one_nan(std::vector<double> values) {
  for (double& value : values) {
    value = std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
  }
  return values;
}

void expect_same(const StepSetting& test, const std::string& what) {
  comm::run_ranks(1, [&](comm::Group& group) {
    StepWorld reference(group, test, /*own=*/false);
    StepWorld world(group, test, /*own=*/true);
    for (int step = 1; step <= kNumSteps; ++step) {
      reference.backwards(step);
      reference.finish(/*as_one=*/false);
      world.backwards(step);
      world.finish(/*as_one=*/true);
    }
    EXPECT_TRUE(same_bits(with_one_nan(world.norms), with_one_nan(reference.norms))) << what;
    EXPECT_EQ(world.versions(), reference.versions()) << what;
    EXPECT_EQ(world.optimizer().num_updates(), reference.optimizer().num_updates()) << what;
    EXPECT_EQ(world.optimizer().num_updates(),
              test.bad_step > 0 && test.skips_nonfinite ? kNumSteps - 1 : kNumSteps);
    EXPECT_TRUE(world.trained() == reference.trained()) << what;
  });
}

TEST(WholeStep, HasTheBitsAndCountsOfAStepThatLooksAtTheNorm) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const device::LateMode mode : {device::LateMode::kLazy, device::LateMode::kRandom}) {
      for (const bool sums_on_the_way : {true, false}) {
        for (const int num_backwards : {1, 2}) {
          for (const double clip_norm : {0.3, 0.0, 1e-5}) {
            if (support::kIsSanitized && clip_norm != 0.3) {
              continue;  // another factor, and the same memory
            }
            StepSetting test;
            test.dtype = dtype;
            test.mode = mode;
            test.sums_on_the_way = sums_on_the_way;
            test.num_backwards = num_backwards;
            test.clip_norm = clip_norm;
            expect_same(test, std::string(to_string(dtype)) + ", " +
                                  (sums_on_the_way ? "on the way" : "at the end") + ", " +
                                  std::to_string(num_backwards) + " backwards, clip " +
                                  std::to_string(clip_norm));
          }
        }
      }
    }
  }
}

TEST(WholeStep, ChangesAndCountsNothingIfItIsSkipped) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int num_backwards : {1, 2}) {
      for (const int bad_step : {1, 2, kNumSteps}) {
        StepSetting test;
        test.dtype = dtype;
        test.num_backwards = num_backwards;
        test.bad_step = bad_step;
        expect_same(test, "step " + std::to_string(bad_step));
      }
    }
  }
}

TEST(WholeStep, KeepsTheWholeStateOfBeforeIfItIsSkipped) {
  comm::run_ranks(1, [&](comm::Group& group) {
    StepSetting test;
    test.bad_step = 2;
    StepWorld world(group, test, true);
    world.backwards(1);
    world.finish(true);
    const auto before = world.trained();
    const auto versions = world.versions();
    world.backwards(2);
    world.finish(true);
    EXPECT_FALSE(std::isfinite(world.norms.back()));
    EXPECT_TRUE(world.trained() == before);
    EXPECT_EQ(world.versions(), versions);
    EXPECT_EQ(world.optimizer().num_updates(), 1);
  });
}

// NaNs spread through what the infinity touches, and the host's and the device's are the same here.
TEST(WholeStep, GoesOnWithWhatIsNotFiniteIfNobodyGuards) {
  StepSetting test;
  test.bad_step = 2;
  test.skips_nonfinite = false;
  expect_same(test, "no guard");
}

TEST(WholeStep, IsHandedOverBeforeAnyOfItHasRun) {
  comm::run_ranks(1, [&](comm::Group& group) {
    StepWorld world(group, StepSetting{}, true);
    world.backwards(1);
    device::Stream& reduce = world.device().stream(device::StreamKind::kReduce);
    const device::Pending gradients = reduce.record();
    ASSERT_TRUE(world.optimizer().start_step(world.reducer(), kStepLr, world.inputs()));
    EXPECT_FALSE(gradients.done()) << "nobody waited for the gradients";
    EXPECT_EQ(world.optimizer().num_updates(), 0);
    EXPECT_EQ(world.params()[0].version(), 0U);
    world.optimizer().finish_step();
    EXPECT_TRUE(gradients.done());
    EXPECT_EQ(world.optimizer().num_updates(), 1);
    int num_done = 0;
    for (int id = 0; id < world.params().num_params(); ++id) {
      num_done += world.params()[id].updated().done() ? 1 : 0;
    }
    EXPECT_LT(num_done, world.params().num_params()) << "the norm is there before the update";
    world.optimizer().wait();
  });
}

TEST(WholeStep, NeedsADeviceOfItsOwnAndOneRank) {
  comm::run_ranks(1, [&](comm::Group& group) {
    StepWorld world(group, StepSetting{}, false);
    world.backwards(1);
    EXPECT_FALSE(world.optimizer().start_step(world.reducer(), kStepLr, world.inputs()));
    world.finish(false);
    EXPECT_EQ(world.optimizer().num_updates(), 1);
  });
  comm::run_ranks(2, [&](comm::Group& group) {
    StepWorld world(group, StepSetting{}, true);
    world.backwards(1);
    EXPECT_FALSE(world.optimizer().start_step(world.reducer(), kStepLr, world.inputs()));
    world.finish(false);
    EXPECT_EQ(world.optimizer().num_updates(), 1);
  });
}

TEST(WholeStep, RefusesAWeightOfZeroBeforeAnythingIsStarted) {
  comm::run_ranks(1, [&](comm::Group& group) {
    StepWorld world(group, StepSetting{}, true);
    world.backwards(1);
    StepInputs inputs = world.inputs();
    inputs.weight = 0;
    EXPECT_THROW(world.optimizer().start_step(world.reducer(), kStepLr, inputs), ConfigError);
    EXPECT_EQ(world.optimizer().num_updates(), 0);
    world.finish(true);
    EXPECT_EQ(world.optimizer().num_updates(), 1);
  });
}

}  // namespace
}  // namespace tessera::optim
