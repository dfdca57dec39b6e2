#include "tessera/planner/prediction.h"

#include <string>

#include <gtest/gtest.h>

namespace tessera::planner {
namespace {

Placement moving(std::int64_t read, std::int64_t written) {
  Placement placement;
  placement.uses_nvme = true;
  placement.step.states_read = read;
  placement.step.states_written = written;
  return placement;
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

TEST(Prediction, TheSlowerOfDiskAndProcessorBinds) {
  StepRates rates = disk_of(100, 100, 100);
  rates.compute_s = 15;
  rates.update_s = 4;
  const Prediction disk = predict_step(moving(1000, 1000), rates);
  EXPECT_TRUE(disk.is_io_bound);
  EXPECT_DOUBLE_EQ(disk.step_s, 20);
  EXPECT_NE(disk.text.find("20 s, bound by the disk"), std::string::npos) << disk.text;
  rates.update_s = 6;
  const Prediction processor = predict_step(moving(1000, 1000), rates);
  EXPECT_FALSE(processor.is_io_bound);
  EXPECT_DOUBLE_EQ(processor.step_s, 21);
  EXPECT_NE(processor.text.find("bound by the processor"), std::string::npos) << processor.text;
}

}  // namespace
}  // namespace tessera::planner
