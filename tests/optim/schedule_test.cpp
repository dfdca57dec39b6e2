// The learning rate by step: tables, and properties for every shape.
#include "tessera/optim/schedule.h"

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

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

// DeepSpeed computes the learning rate after a step, from that step's number; the first step has
// the value from before any. Numbers of its own schedulers: from 2 to 8 over 4 steps, 12 in all.
TEST(LearningRate, HasTheTimingOfDeepSpeedsSchedulersStepByStep) {
  ScheduleOptions options = schedule(Decay::kConstant, 4, 12);
  options.warmup_start_lr = 2;
  options.deepspeed_timing = true;
  const auto expect_rates = [&options](const std::vector<double>& rates) {
    for (std::size_t step = 0; step < rates.size(); ++step) {
      EXPECT_DOUBLE_EQ(learning_rate(options, static_cast<std::int64_t>(step)), rates[step])
          << "step " << step;
    }
  };
  expect_rates({2, 2, 3.5, 5, 6.5, 8, 8, 8});  // WarmupLR, linear
  options.warmup_shape = WarmupShape::kLog;
  expect_rates({2, 2, 5, 2 + 6 * std::log(3) / std::log(4), 8, 8, 8});  // WarmupLR, log
  options.warmup_shape = WarmupShape::kLinear;
  options.decay = Decay::kLinear;  // WarmupDecayLR: to warmup_min_lr at iteration 12
  expect_rates({2, 2, 3.5, 5, 6.5, 8, 7.25, 6.5, 5.75, 5, 4.25, 3.5, 2.75, 2, 2});
  options.decay = Decay::kCosine;  // WarmupCosineLR: the cosine has begun at iteration 4
  const auto cosine = [](double progress) {
    return 2 + 6 * 0.5 * (1 + std::cos(std::numbers::pi * progress));
  };
  expect_rates({2, 2, 3.5, 5, 6.5, cosine(1.0 / 8), cosine(2.0 / 8), cosine(3.0 / 8), 5,
                cosine(5.0 / 8), cosine(6.0 / 8), cosine(7.0 / 8), 2, 2});
}

TEST(LearningRate, GoesUpAndDownOnceAndThenDecays) {
  ScheduleOptions options = schedule(Decay::kOneCycle, 0, 0);
  options.warmup_start_lr = 2;
  options.cycle_up_steps = 4;
  options.cycle_down_steps = 2;
  const auto rate = [&options](std::int64_t step) { return learning_rate(options, step); };
  EXPECT_DOUBLE_EQ(rate(0), 2);
  EXPECT_DOUBLE_EQ(rate(1), 3.5);
  EXPECT_DOUBLE_EQ(rate(4), 8);
  EXPECT_DOUBLE_EQ(rate(5), 5);
  EXPECT_DOUBLE_EQ(rate(6), 2);
  EXPECT_DOUBLE_EQ(rate(100), 2);
  options.decay_steps = 10;
  options.decay_rate = 0.5;
  EXPECT_DOUBLE_EQ(rate(6), 2);
  EXPECT_DOUBLE_EQ(rate(16), 2 / 1.5);
  EXPECT_DOUBLE_EQ(rate(26), 1);
  options.cycle_up_stairs = 2;
  EXPECT_DOUBLE_EQ(rate(1), 2);
  EXPECT_DOUBLE_EQ(rate(2), 5);
  EXPECT_DOUBLE_EQ(rate(3), 5);
  EXPECT_DOUBLE_EQ(rate(4), 8) << "the top is reached";
  EXPECT_DOUBLE_EQ(rate(5), 5) << "the way down has no stairs";
  options.cycle_down_stairs = 1;
  EXPECT_DOUBLE_EQ(rate(5), 2);
}

TEST(LearningRate, GrowsWithoutAnEndInARangeTest) {
  ScheduleOptions options = schedule(Decay::kRangeTest, 0, 0);
  options.warmup_start_lr = 2;
  options.range_steps = 10;
  options.range_rate = 5;
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 12);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1000), 1002);
  options.range_staircase = true;
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 19), 12);
}

TEST(LearningRate, BeginsWhereTheRunBegins) {
  for (const Decay decay :
       {Decay::kConstant, Decay::kLinear, Decay::kCosine, Decay::kOneCycle, Decay::kRangeTest}) {
    ScheduleOptions whole = schedule(decay, 4, 20);
    whole.cycle_up_steps = 3;
    whole.warmup_start_lr = 1;
    whole.deepspeed_timing = true;
    ScheduleOptions rest = whole;
    rest.first_step = 7;
    for (std::int64_t step = 0; step < 20; ++step) {
      EXPECT_EQ(learning_rate(rest, step), learning_rate(whole, step + 7));
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
  config.set("schedule.warmup_steps", std::int64_t{11}, "--warmup");
  EXPECT_EQ(message_of(config, 10),
            "schedule.warmup_steps = 11 (--warmup) is more than the 10 steps of the run: the "
            "learning rate would never be reached; give a shorter warm-up or more steps");
  EXPECT_EQ(message_of(config, 11), "no error");
  config.set("schedule.kind", std::string("constant"));
  EXPECT_EQ(message_of(config, 0), "no error");
}

TEST(ScheduleOptions, FitAWarmupThatNobodyGaveToTheRun) {
  const Config config = Config::from_json(
      R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}}})", "ds.json");
  const ScheduleOptions fitted = ScheduleOptions::from(config, 50);
  EXPECT_EQ(fitted.warmup_steps, 5);
  EXPECT_EQ(fitted.notice,
            "schedule.warmup_steps = 1000 (a default, DeepSpeed's) is more than the 50 steps of "
            "the run: a tenth of them is taken, 5");
  EXPECT_EQ(ScheduleOptions::from(config, 1000).warmup_steps, 1000);
  EXPECT_EQ(ScheduleOptions::from(config, 1000).notice, "");
  EXPECT_EQ(ScheduleOptions::from(config, 3).warmup_steps, 0);
}

TEST(ScheduleOptions, LetARunEndInTheWarmupOfADeepSpeedFileAndSaySo) {
  const Config config = Config::from_json(
      R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100,
          "warmup_type": "linear", "warmup_max_lr": 2}}})",
      "ds.json");
  const ScheduleOptions options = ScheduleOptions::from(config, 51);
  EXPECT_EQ(options.warmup_steps, 100);
  EXPECT_EQ(options.notice,
            "the 51 steps of the run end within the warm-up, schedule.warmup_steps = 100 "
            "(ds.json: scheduler.params.warmup_num_steps): the last learning rate is 0.98, not 2");
}

}  // namespace
}  // namespace tessera::optim
