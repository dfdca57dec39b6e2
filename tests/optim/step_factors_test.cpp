// From sums to factors: tables; factors of a step that stay where kernels are, and updates that
// take them from there.
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/optim/kernels.h"
#include "testing/mock_device.h"
#include "tests/optim/step_cases.h"
#include "tests/optim/update_case.h"

namespace tessera::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(StepFactors, AreThoseOfTheTable) {
  struct Row {
    double squares, weight, loss_scale, clip_norm;
    double norm, gradient_scale;
  };
  const Row rows[] = {
      // No clipping: weight and loss scale are taken out, exactly.
      {25, 1, 1, 0, 5, 1},
      {25, 4, 1, 0, 1.25, 0.25},
      {25, 1, 65536, 0, 5 / 65536.0, 1 / 65536.0},
      {25, 4, 2, 0, 0.625, 0.125},
      {0, 3, 1, 0, 0, 1 / 3.0},
      // Below the limit nothing changes; at the limit the 1e-6 shows, as it does in torch.
      {25, 1, 1, 6, 5, 1},
      {25, 1, 1, 5, 5, 5 / (5 + 1e-6)},
      {25, 1, 1, 1, 5, 1 / (5 + 1e-6)},
      // The limit holds for the mean gradient.
      {25, 4, 2, 0.5, 0.625, 0.125 * (0.5 / (0.625 + 1e-6))},
      {0, 1, 1, 1, 0, 1},
  };
  for (const Row& row : rows) {
    StepSums sums;
    sums.gradient_squares = row.squares;
    sums.weight = row.weight;
    sums.weighted_loss = 3 * row.weight;
    const StepFactors factors = step_factors(sums, row.loss_scale, row.clip_norm);
    EXPECT_TRUE(factors.finite);
    EXPECT_EQ(factors.grad_norm, row.norm);
    EXPECT_EQ(factors.gradient_scale, row.gradient_scale);
    EXPECT_EQ(factors.loss, 3);
  }
}

TEST(StepFactors, ShowANonFiniteNormAsItCame) {
  for (const double clip_norm : {0.0, 1.0}) {
    StepSums sums;
    sums.weight = 2;
    sums.gradient_squares = kInfinity;
    StepFactors factors = step_factors(sums, 1, clip_norm);
    EXPECT_FALSE(factors.finite);
    EXPECT_EQ(factors.grad_norm, kInfinity);
    EXPECT_EQ(factors.gradient_scale, 0.5);  // not zero: the update would hide what happened
    sums.gradient_squares = kNan;
    factors = step_factors(sums, 1, clip_norm);
    EXPECT_FALSE(factors.finite);
    EXPECT_TRUE(std::isnan(factors.grad_norm));
    EXPECT_EQ(factors.gradient_scale, 0.5);
  }
}

TEST(StepFactors, NeedAPositiveWeight) {
  for (const double weight : {0.0, -1.0, kNan, kInfinity}) {
    StepSums sums;
    sums.weight = weight;
    EXPECT_THROW(step_factors(sums, 1, 0), ConfigError) << weight;
  }
}

using device::StreamKind;

class StepOnDeviceTest : public ::testing::Test {
 protected:
  device::Stream& stream() { return device_->stream(StreamKind::kReduce); }

  Slab after_updates(const UpdateList& list, const RuleOptions& rule, const StepOnDevice* step) {
    AlignedBytes memory(list.slab.bytes());
    kernels_->start_updates(rule, with_step(list.tasks(memory.data()), step), stream()).wait();
    Slab out = list.slab;
    out.bytes() = memory.bytes();
    return out;
  }

  std::unique_ptr<device::Device> device_ = device::make_cpu_device();
  std::unique_ptr<Kernels> kernels_ = make_cpu_kernels(2);
};

TEST_F(StepOnDeviceTest, HasTheBitsOfTheDefinition) {
  for (const StepCase& test : step_cases()) {
    StepSums sums = test.sums();
    sums.gradient_squares = -1;
    StepOnDevice step{};
    FoundStep for_host{};
    std::ignore = kernels_->start_total(addresses(test.squares.data(), test.squares.size()),
                                        &sums.gradient_squares, stream());
    kernels_->start_step_factors(&sums, test.inputs, &step, &for_host, stream()).wait();
    const StepOnDevice expected = defined_step(test);
    EXPECT_TRUE(same_step(step, expected)) << text_of(step) << "; not " << text_of(expected);
    EXPECT_TRUE(same_found(for_host, {expected, test.sums()})) << text_of(for_host.step);
  }
}

TEST_F(StepOnDeviceTest, HasTheBitsOfTheHostsFactors) {
  for (const StepCase& test : step_cases()) {
    if (!(test.weight > 0) || std::isinf(test.weight)) {
      continue;  // the host refuses it
    }
    const StepOnDevice expected = defined_step(test);
    const StepFactors factors =
        step_factors(test.sums(), test.inputs.loss_scale, test.inputs.clip_norm);
    const StepOnDevice found{expected.gradient_squares, factors.grad_norm, factors.gradient_scale,
                             factors.finite ? 1 : 0, expected.skips};
    EXPECT_TRUE(same_step(found, expected)) << text_of(found) << "; not " << text_of(expected);
  }
}

TEST_F(StepOnDeviceTest, NeedsAScaleThatCanBe) {
  StepSums sums{1, 1};
  StepOnDevice step{};
  FoundStep found{};
  EXPECT_THROW((void)kernels_->start_step_factors(&sums, {0, 1, true}, &step, &found, stream()),
               InternalError);
  EXPECT_THROW((void)kernels_->start_step_factors(&sums, {1, -1, true}, &step, &found, stream()),
               InternalError);
}

TEST_F(StepOnDeviceTest, IsTheFactorOfUpdates) {
  const UpdateList list(odd_update_shapes());
  StepOnDevice step{};
  step.gradient_scale = 0.37;  // that of the list
  for (const auto& [name, rule] : all_rules()) {
    EXPECT_TRUE(after_updates(list, rule, &step).same_as(list.expected(rule))) << name;
  }
}

TEST_F(StepOnDeviceTest, LeavesEveryBitIfItSkips) {
  const UpdateList list(odd_update_shapes());
  StepOnDevice step{};
  step.gradient_scale = std::numeric_limits<double>::quiet_NaN();
  step.skips = 1;
  for (const auto& [name, rule] : all_rules()) {
    AlignedBytes memory(list.slab.bytes());
    auto tasks = list.tasks(memory.data());
    for (UpdateTask& task : tasks) {
      task.scalars.on_device = &step;
    }
    kernels_->start_updates(rule, tasks, stream()).wait();
    update(rule, tasks.back().scalars, tasks.back().span);
    EXPECT_TRUE(memory.bytes() == list.slab.bytes()) << name;
  }
}

TEST_F(StepOnDeviceTest, SkipsOnlyUpdatesThatTakeIt) {
  const UpdateList list({{5000}, {5000}, {5000}});
  StepOnDevice step{};
  step.skips = 1;
  Slab expected = list.slab;
  AlignedBytes memory(expected.bytes());
  const UpdateTask last = list.tasks(memory.data()).back();
  update({}, last.scalars, last.span);
  expected.bytes() = memory.bytes();
  EXPECT_TRUE(after_updates(list, {}, &step).same_as(expected));
  EXPECT_FALSE(expected.same_as(list.slab));
}

// The whole chain is enqueued before anything of it has run.
TEST_F(StepOnDeviceTest, IsReadWhenTheUpdateRuns) {
  for (const bool is_finite : {true, false}) {
    const auto late = device::make_mock_device();
    device::Stream& reduce = late->stream(StreamKind::kReduce);
    const UpdateList list({{4099, 1, 0, DType::kBFloat16, DType::kBFloat16}});
    AlignedBytes memory(list.slab.bytes());
    std::vector<UpdateTask> tasks = list.tasks(memory.data());
    const auto gradient = random_floats(10000, 1, 3);
    double squares = std::numeric_limits<double>::quiet_NaN();
    StepSums step_sums{0, 2};
    StepOnDevice step{};
    FoundStep for_host{};
    step.gradient_scale = for_host.step.gradient_scale = -1;
    tasks[0].scalars.on_device = &step;
    const NormSpan span{gradient.data(), DType::kFloat32, 10000};
    const StepInputs inputs{1, 1, true};
    const double infinite = std::numeric_limits<double>::infinity();
    const std::vector<const double*> sums{&squares, is_finite ? &squares : &infinite};
    const auto summed = kernels_->start_sums_of_squares({&span, 1}, &squares, reduce);
    const auto total = kernels_->start_total(sums, &step_sums.gradient_squares, reduce);
    const auto found = kernels_->start_step_factors(&step_sums, inputs, &step, &for_host, reduce);
    const auto updated = kernels_->start_updates({}, tasks, reduce);
    EXPECT_EQ(for_host.step.gradient_scale, -1);
    found.wait();
    const double own = sum_of_squares(gradient.data(), 10000);
    const StepOnDevice expected = defined_step({{own, is_finite ? own : infinite}, 2, inputs});
    EXPECT_TRUE(same_step(for_host.step, expected)) << text_of(for_host.step);
    updated.wait();
    UpdateList reference({{4099, 1, 0, DType::kBFloat16, DType::kBFloat16}});
    AlignedBytes updated_memory(reference.slab.bytes());
    if (is_finite) {
      UpdateTask task = reference.tasks(updated_memory.data())[0];
      task.scalars.gradient_scale = expected.gradient_scale;
      update({}, task.scalars, task.span);
    }
    Slab out = list.slab;
    out.bytes() = memory.bytes();
    reference.slab.bytes() = updated_memory.bytes();
    EXPECT_TRUE(out.same_as(reference.slab)) << is_finite;
  }
}

}  // namespace
}  // namespace tessera::optim
