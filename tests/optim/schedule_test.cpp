// The learning rate by step: tables, and properties for every shape.
#include "tessera/optim/schedule.h"

#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

ScheduleOptions schedule(Decay decay, std::int64_t warmup_steps, std::int64_t total_steps) {
  ScheduleOptions options;
  options.decay = decay;
  options.lr = 8;
  options.final_lr = 2;
  options.warmup_steps = warmup_steps;
  options.total_steps = total_steps;
  return options;
}

TEST(LearningRate, FollowsTheTable) {
  struct Row {
    Decay decay;
    std::int64_t warmup_steps, total_steps, step;
    double lr;
  };
  const Row rows[] = {
      {Decay::kConstant, 0, 0, 0, 8}, {Decay::kConstant, 0, 10, 1000000, 8},
      {Decay::kConstant, 4, 0, 0, 0}, {Decay::kConstant, 4, 0, 1, 2},
      {Decay::kConstant, 4, 0, 3, 6}, {Decay::kConstant, 4, 0, 4, 8},
      {Decay::kLinear, 0, 4, 0, 8},   {Decay::kLinear, 0, 4, 1, 6.5},
      {Decay::kLinear, 0, 4, 3, 3.5}, {Decay::kLinear, 0, 4, 4, 2},
      {Decay::kLinear, 0, 4, 99, 2},  {Decay::kLinear, 2, 6, 1, 4},
      {Decay::kLinear, 2, 6, 2, 8},   {Decay::kLinear, 2, 6, 4, 5},
      {Decay::kCosine, 2, 6, 2, 8},   {Decay::kCosine, 2, 6, 4, 5},
      {Decay::kCosine, 2, 6, 6, 2},   {Decay::kCosine, 2, 6, 7, 2},
      {Decay::kCosine, 4, 4, 3, 6},   {Decay::kCosine, 4, 4, 4, 2},
  };
  for (const Row& row : rows) {
    EXPECT_DOUBLE_EQ(
        learning_rate(schedule(row.decay, row.warmup_steps, row.total_steps), row.step), row.lr)
        << static_cast<int>(row.decay) << " warm-up " << row.warmup_steps << " total "
        << row.total_steps << " step " << row.step;
  }
  EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::kCosine, 0, 3), 1), 2 + 6 * 0.75);
  EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::kCosine, 0, 3), 2), 2 + 6 * 0.25);
}

TEST(LearningRate, WarmsUpLogarithmicallyAsDeepSpeedDoes) {
  ScheduleOptions options = schedule(Decay::kConstant, 8, 0);
  options.warmup_shape = WarmupShape::kLog;
  options.warmup_start_lr = 2;
  EXPECT_EQ(learning_rate(options, 0), 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 2 + 6 * (1.0 / 3));  // log(2) / log(8)
  EXPECT_DOUBLE_EQ(learning_rate(options, 3), 2 + 6 * (2.0 / 3));
  EXPECT_EQ(learning_rate(options, 7), 8);
  EXPECT_EQ(learning_rate(options, 8), 8);
  options.warmup_steps = 1;
  EXPECT_EQ(learning_rate(options, 0), 2);
  EXPECT_EQ(learning_rate(options, 1), 8);
}

TEST(LearningRate, RisesThenFallsBetweenItsBounds) {
  for (const Decay decay : {Decay::kConstant, Decay::kLinear, Decay::kCosine}) {
    for (const WarmupShape shape : {WarmupShape::kLinear, WarmupShape::kLog}) {
      for (std::int64_t total = 1; total <= 12; ++total) {
        for (std::int64_t warmup = 0; warmup <= total; ++warmup) {
          ScheduleOptions options = schedule(decay, warmup, total);
          options.warmup_shape = shape;
          for (std::int64_t step = 0; step < total + 3; ++step) {
            const double lr = learning_rate(options, step);
            const double next = learning_rate(options, step + 1);
            ASSERT_GE(lr, 0);
            ASSERT_LE(lr, options.lr);
            if (step + 1 < warmup) {
              ASSERT_GE(next, lr) << step << " of " << warmup << " and " << total;
            } else if (step >= warmup) {
              ASSERT_LE(next, lr) << step << " of " << warmup << " and " << total;
              ASSERT_GE(lr, options.final_lr);
            }
          }
          if (warmup < total || decay == Decay::kConstant) {
            ASSERT_EQ(learning_rate(options, warmup), options.lr);
          }
        }
      }
    }
  }
}

std::string message_of(const Config& config, std::int64_t run_steps) {
  try {
    ScheduleOptions::from(config, run_steps);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ScheduleOptions, ComeFromTheOptionsOfTheRun) {
  Config config;
  const ScheduleOptions defaults = ScheduleOptions::from(config, 50);
  EXPECT_EQ(defaults.decay, Decay::kConstant);
  EXPECT_EQ(defaults.warmup_shape, WarmupShape::kLinear);
  EXPECT_EQ(defaults.lr, 1e-3);
  EXPECT_EQ(defaults.total_steps, 50);
  EXPECT_EQ(defaults.warmup_steps, 0);
  config.set("schedule.kind", std::string("cosine"));
  config.set("schedule.warmup_shape", std::string("log"));
  config.set("optim.lr", 0.5);
  config.set("schedule.warmup_start_lr", 0.25);
  config.set("schedule.final_lr", 0.125);
  config.set("schedule.warmup_steps", std::int64_t{3});
  config.set("schedule.total_steps", std::int64_t{9});
  ScheduleOptions given = ScheduleOptions::from(config, 50);
  EXPECT_EQ(given.decay, Decay::kCosine);
  EXPECT_EQ(given.warmup_shape, WarmupShape::kLog);
  EXPECT_EQ(given.lr, 0.5);
  EXPECT_EQ(given.warmup_start_lr, 0.25);
  EXPECT_EQ(given.final_lr, 0.125);
  EXPECT_EQ(given.warmup_steps, 3);
  EXPECT_EQ(given.total_steps, 9);
  config.set("schedule.kind", std::string("linear"));
  EXPECT_EQ(ScheduleOptions::from(config, 50).decay, Decay::kLinear);
}

TEST(ScheduleOptions, RefuseContradictions) {
  Config config;
  config.set("schedule.kind", std::string("cosine"));
  EXPECT_NE(message_of(config, 0).find("schedule.total_steps"), std::string::npos);
  EXPECT_EQ(message_of(config, 10), "no error");
  config.set("schedule.warmup_steps", std::int64_t{11});
  EXPECT_NE(message_of(config, 10).find("schedule.warmup_steps = 11"), std::string::npos);
  EXPECT_EQ(message_of(config, 11), "no error");
  config.set("schedule.kind", std::string("constant"));
  EXPECT_EQ(message_of(config, 0), "no error");
}

}  // namespace
}  // namespace tessera::optim
