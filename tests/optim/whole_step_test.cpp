// A step whose norm, factor and update are handed over together, on the mock device, where work
// ends when somebody waits for it: the bits and the counts are those of a step whose norm the host
// sees first.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/optim/optimizer_fixture.h"
#include "tests/optim/update_case.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr int kNumSteps = 4;

struct StepSetting {
  FixtureCase fixture;
  double clip_norm = 0.3;
  bool skips_nonfinite = true;
};

StepSetting on_device(DType dtype = DType::kBFloat16) {
  StepSetting test;
  test.fixture.shapes = {{9001}, {3, {}, true, 2}, {17, {}, false},
                         {0},    {4099},           {5000, {}, true, 3}};
  test.fixture.dtype = test.fixture.gradient_dtype = dtype;
  test.fixture.device = FixtureDevice::kDiscrete;
  test.fixture.num_micro_batches = 0;
  return test;
}

StepInputs inputs(const StepSetting& test) {
  return {3, 1024, test.clip_norm, test.skips_nonfinite};
}

// As one piece of work, or as an engine does it that looks at the norm. Gives the norm.
double finish(OptimizerFixture& fixture, const StepSetting& test, bool as_one) {
  Optimizer& optimizer = fixture.optimizer();
  double norm = 0;
  if (as_one) {
    EXPECT_TRUE(optimizer.start_step(fixture.reducer(), kFixtureLr, inputs(test)));
    norm = optimizer.finish_step();
  } else {
    norm = optimizer.sum_of_squares(fixture.reducer());
    const StepFactors factors = step_factors({norm, 3, 0}, 1024, test.clip_norm);
    if (factors.finite || !test.skips_nonfinite) {
      optimizer.start_update(fixture.reducer(), kFixtureLr, factors.gradient_scale);
    }
  }
  optimizer.wait();
  fixture.reducer().clear();
  return norm;
}

std::vector<std::uint64_t> versions(OptimizerFixture& fixture) {
  std::vector<std::uint64_t> all;
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    all.push_back(fixture.params()[id].version());
  }
  return all;
}

void expect_same(const StepSetting& test, const std::string& what) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture reference(group, in_memory(test.fixture));
    OptimizerFixture fixture(group, test.fixture);
    std::vector<double> expected_norms;
    std::vector<double> norms;
    // Which of two NaNs a sum keeps, and with which sign, is the compiler's choice.
    const auto one_nan = [](double value) {
      return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
    };
    for (int step = 1; step <= kNumSteps; ++step) {
      reference.backward(step);
      expected_norms.push_back(one_nan(finish(reference, test, /*as_one=*/false)));
      fixture.backward(step);
      norms.push_back(one_nan(finish(fixture, test, /*as_one=*/true)));
    }
    EXPECT_TRUE(same_bits(norms, expected_norms)) << what;
    EXPECT_EQ(versions(fixture), versions(reference)) << what;
    EXPECT_EQ(reference.optimizer().num_updates(), fixture.optimizer().num_updates()) << what;
    EXPECT_EQ(fixture.optimizer().num_updates(),
              test.fixture.bad_step > 0 && test.skips_nonfinite ? kNumSteps - 1 : kNumSteps);
    EXPECT_TRUE(fixture.trained() == reference.trained()) << what;
  });
}

TEST(WholeStep, HasTheBitsAndCountsOfAStepThatLooksAtTheNorm) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const device::LateMode mode : {device::LateMode::kLazy, device::LateMode::kRandom}) {
      for (const bool sums_squares : {true, false}) {
        for (const int num_backwards : {1, 2}) {
          for (const double clip_norm : {0.3, 0.0, 1e-5}) {
            if (support::kIsSanitized && clip_norm != 0.3) {
              continue;  // another factor, and the same memory
            }
            StepSetting test = on_device(dtype);
            test.fixture.mode = mode;
            test.fixture.sums_squares = sums_squares;
            test.fixture.num_backwards = num_backwards;
            test.clip_norm = clip_norm;
            expect_same(test, std::string(to_string(dtype)) + ", " +
                                  (sums_squares ? "on the way" : "at the end") + ", " +
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
    for (const int bad_step : {1, 2, kNumSteps}) {
      StepSetting test = on_device(dtype);
      test.fixture.num_backwards = bad_step == 2 ? 1 : 2;
      test.fixture.bad_step = bad_step;
      expect_same(test, "step " + std::to_string(bad_step));
    }
  }
}

TEST(WholeStep, KeepsTheWholeStateOfBeforeIfItIsSkipped) {
  StepSetting test = on_device();
  test.fixture.bad_step = 2;
  run_one(test.fixture, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    finish(fixture, test, true);
    const Trained before = fixture.trained();
    const std::vector<std::uint64_t> known = versions(fixture);
    fixture.backward(2);
    EXPECT_FALSE(std::isfinite(finish(fixture, test, true)));
    EXPECT_TRUE(fixture.trained() == before);
    EXPECT_EQ(versions(fixture), known);
    EXPECT_EQ(fixture.optimizer().num_updates(), 1);
  });
}

// NaNs spread through what the infinity touches, and the host's and the device's are the same here.
TEST(WholeStep, GoesOnWithWhatIsNotFiniteIfNobodyGuards) {
  StepSetting test = on_device();
  test.fixture.bad_step = 2;
  test.skips_nonfinite = false;
  expect_same(test, "no guard");
}

TEST(WholeStep, IsHandedOverBeforeAnyOfItHasRun) {
  const StepSetting test = on_device();
  run_one(test.fixture, [&](OptimizerFixture& fixture) {
    Optimizer& optimizer = fixture.optimizer();
    fixture.backward(1);
    const device::Pending gradients = fixture.device().stream(device::StreamKind::kReduce).record();
    ASSERT_TRUE(optimizer.start_step(fixture.reducer(), kFixtureLr, inputs(test)));
    EXPECT_FALSE(gradients.done()) << "nobody waited for the gradients";
    EXPECT_EQ(optimizer.num_updates(), 0);
    EXPECT_EQ(fixture.params()[0].version(), 0U);
    optimizer.finish_step();
    EXPECT_TRUE(gradients.done());
    EXPECT_EQ(optimizer.num_updates(), 1);
    EXPECT_FALSE(fixture.params()[0].updated().done()) << "the norm is there before the update";
    optimizer.wait();
  });
}

TEST(WholeStep, NeedsADiscreteDeviceAndOneRank) {
  for (const int num_ranks : {1, 2}) {
    StepSetting test = on_device();
    test.fixture.device = num_ranks == 1 ? FixtureDevice::kCpu : FixtureDevice::kDiscrete;
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      OptimizerFixture fixture(group, test.fixture);
      fixture.backward(1);
      EXPECT_FALSE(fixture.optimizer().start_step(fixture.reducer(), kFixtureLr, inputs(test)));
      finish(fixture, test, false);
      EXPECT_EQ(fixture.optimizer().num_updates(), 1);
    });
  }
}

TEST(WholeStep, RefusesAWeightOfZeroBeforeAnythingIsStarted) {
  const StepSetting test = on_device();
  run_one(test.fixture, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    StepInputs zero = inputs(test);
    zero.weight = 0;
    EXPECT_THROW(fixture.optimizer().start_step(fixture.reducer(), kFixtureLr, zero), ConfigError);
    EXPECT_EQ(fixture.optimizer().num_updates(), 0);
    finish(fixture, test, true);
    EXPECT_EQ(fixture.optimizer().num_updates(), 1);
  });
}

}  // namespace
}  // namespace tessera::optim
