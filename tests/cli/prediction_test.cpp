#include "cli/prediction.h"

#include <string>

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

using planner::MemoryPlan;

MemoryPlan moving(std::int64_t read, std::int64_t written) {
  MemoryPlan plan;
  plan.uses_nvme = true;
  plan.step.states_read = read;
  plan.step.states_written = written;
  return plan;
}

StepRates disk_of(double read, double write, double mixed) {
  StepRates rates;
  rates.read_bytes_per_s = read;
  rates.write_bytes_per_s = write;
  rates.mixed_bytes_per_s = mixed;
  return rates;
}

TEST(Prediction, WhatIsReadAndWrittenAtOnceGoesAtTheMixedRate) {
  const Prediction prediction = predict_step(moving(3000, 1000), disk_of(200, 50, 100));
  // 2 * 1000 mixed, 2000 read.
  EXPECT_DOUBLE_EQ(prediction.io_s, 2000.0 / 100 + 2000.0 / 200);
  EXPECT_DOUBLE_EQ(predict_step(moving(0, 1000), disk_of(200, 50, 100)).io_s, 1000.0 / 50);
}

TEST(Prediction, RanksOfAMachineShareTheDisk) {
  StepRates rates = disk_of(200, 50, 100);
  rates.num_local_ranks = 4;
  EXPECT_DOUBLE_EQ(predict_step(moving(1000, 1000), rates).io_s, 4 * 2000.0 / 100);
}

TEST(Prediction, InEachPhaseTheSlowerOfDiskAndCpuBinds) {
  StepRates rates = disk_of(100, 100, 100);
  rates.compute_s = 30;  // 10 forward, 20 backward
  rates.update_s = 4;
  // 20 s of update beside 14 s of cpu; then nothing beside 20 s.
  const Prediction prediction = predict_step(moving(1000, 1000), rates);
  EXPECT_DOUBLE_EQ(prediction.step_s, 20 + 20);
  EXPECT_DOUBLE_EQ(prediction.io_s, 20);
  EXPECT_DOUBLE_EQ(prediction.cpu_s, 34);
  EXPECT_FALSE(prediction.is_io_bound);
  EXPECT_NE(prediction.text.find("40 s, bound by the CPU"), std::string::npos) << prediction.text;
}

TEST(Prediction, GradientsAndParametersOfBackwardBelongToItsPhase) {
  MemoryPlan plan;
  plan.step.gradients_written = 3000;  // three micro-batches
  plan.step.gradients_read = 3000;     // two additions, and the update
  plan.step.parameters_read = 6000;    // six passes
  StepRates rates = disk_of(100, 100, 100);
  rates.num_micro_batches = 3;
  // The update reads 1000 and the first forward 1000; the rest is 7000 read and 3000 written.
  rates.compute_s = 27;  // three forwards of 3, and so on
  const Prediction prediction = predict_step(plan, rates);
  EXPECT_DOUBLE_EQ(prediction.step_s, 20 + 100);
  EXPECT_TRUE(prediction.is_io_bound);
  rates.compute_s = 270;
  EXPECT_DOUBLE_EQ(predict_step(plan, rates).step_s, 30 + 240);
}

TEST(Prediction, ForwardDoesNotReadWhatTheUpdateHandsOver) {
  MemoryPlan plan = moving(1000, 1000);
  plan.step.parameters_read = 4000;  // two micro-batches, forward and backward
  plan.step.parameters_from_update = 700;
  StepRates rates = disk_of(100, 100, 100);
  rates.num_micro_batches = 2;
  EXPECT_DOUBLE_EQ(predict_step(plan, rates).io_s, (1000 + 1000 + 300 + 3000) / 100.0);
  // Where parameters stay until backward, there is no other read.
  plan.step.parameters_read = 700;
  EXPECT_DOUBLE_EQ(predict_step(plan, rates).io_s, (1000 + 1000) / 100.0);
}

}  // namespace
}  // namespace tessera::cli
