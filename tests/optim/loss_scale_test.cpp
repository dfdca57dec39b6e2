// The loss scale against tables, and against a plain model for every short history.
#include "tessera/optim/loss_scale.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

LossScaleOptions dynamic(std::int64_t window, std::int64_t hysteresis) {
  LossScaleOptions options;
  options.enabled = true;
  options.initial = 1024;
  options.window = window;
  options.hysteresis = hysteresis;
  return options;
}

// '+' a good step, '-' a non-finite one.
double after(const LossScaleOptions& options, const std::string& steps) {
  LossScale scale(options);
  for (const char step : steps) {
    scale.update(step == '+');
  }
  return scale.value();
}

TEST(LossScale, FollowsTheTable) {
  struct Row {
    std::int64_t window, hysteresis;
    bool consecutive;
    const char* steps;
    double value;
  };
  const Row rows[] = {
      {3, 1, false, "", 1024},
      {3, 1, false, "++", 1024},
      {3, 1, false, "+++", 2048},
      {3, 1, false, "++++++", 4096},
      {3, 1, false, "++-+++", 1024},  // halved, and doubled after three more
      {3, 1, false, "++-++", 512},
      {3, 1, false, "---", 128},
      // Hysteresis: the first overflow is free, and so is none after it until the scale has grown.
      {3, 2, false, "-", 1024},
      {3, 2, false, "--", 512},
      {3, 2, false, "---", 256},
      {3, 2, false, "-+-", 512},
      {3, 2, false, "-+++-", 2048},
      {3, 2, false, "-+++--", 1024},
      // Consecutive: any good step makes the next overflow free again.
      {3, 2, true, "-+-+-", 1024},
      {3, 2, true, "--+-", 512},
      {3, 2, true, "--", 512},
      {1, 1, false, "+++", 8192},
  };
  for (const Row& row : rows) {
    LossScaleOptions options = dynamic(row.window, row.hysteresis);
    options.consecutive_hysteresis = row.consecutive;
    EXPECT_EQ(after(options, row.steps), row.value)
        << row.steps << " window " << row.window << " hysteresis " << row.hysteresis;
  }
}

// The rules once more, as sentences over the whole history instead of counters.
double model(const LossScaleOptions& options, const std::string& steps) {
  double value = options.initial;
  std::int64_t overflows = 0;  // since the hysteresis was last filled
  std::int64_t run = 0;
  for (const char step : steps) {
    run = step == '+' ? run + 1 : 0;
    const bool grows = run > 0 && run % options.window == 0;
    value *= grows ? 2 : 1;
    overflows = grows || (run > 0 && options.consecutive_hysteresis) ? 0 : overflows;
    overflows += step == '-' ? 1 : 0;
    value = step == '-' && overflows >= options.hysteresis ? value / 2 : value;
  }
  return value;
}

TEST(LossScale, AgreesWithTheModelForEveryHistoryOfTenSteps) {
  for (const std::int64_t window : {1, 2, 3}) {
    for (const std::int64_t hysteresis : {1, 2, 3}) {
      for (const bool consecutive : {false, true}) {
        LossScaleOptions options = dynamic(window, hysteresis);
        options.min = 1e-9;
        options.consecutive_hysteresis = consecutive;
        for (unsigned history = 0; history < 1024; ++history) {
          std::string steps;
          for (unsigned bit = 0; bit < 10; ++bit) {
            steps += (history >> bit & 1U) != 0 ? '+' : '-';
          }
          ASSERT_EQ(after(options, steps), model(options, steps)) << steps;
        }
      }
    }
  }
}

TEST(LossScale, GoesOnFromItsStateAfterEveryHistory) {
  const LossScaleOptions options = dynamic(3, 2);
  for (const std::string before : {"", "+", "++", "-", "--", "+++-", "++-+"}) {
    LossScale first(options);
    for (const char step : before) {
      first.update(step == '+');
    }
    LossScale second(options);
    second.set_state(first.state());
    for (const char step : std::string("++-+--+++-")) {
      EXPECT_EQ(second.value(), first.value()) << before;
      first.update(step == '+');
      second.update(step == '+');
    }
    EXPECT_EQ(second.value(), first.value()) << before;
  }
  LossScaleOptions fixed = options;
  fixed.fixed = 64;
  LossScale scale(fixed);
  scale.set_state({.value = 8, .hysteresis_left = 1, .good_steps = 1});
  EXPECT_EQ(scale.value(), 64) << "what the options fix stays";
}

TEST(LossScale, StopsAtTheMinimumWithAWordOfAdvice) {
  LossScaleOptions options = dynamic(1000, 2);
  options.min = 300;
  LossScale scale(options);
  for (int i = 0; i < 3; ++i) {
    scale.update(false);
  }
  EXPECT_EQ(scale.value(), 300);  // not 256
  try {
    scale.update(false);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("loss_scale.min = 300"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(scale.value(), 300);
}

TEST(LossScale, IsConstantWhereFixedAndOneWhereNotNeeded) {
  LossScaleOptions options = dynamic(1, 1);
  options.fixed = 128;
  EXPECT_EQ(after(options, "+-+--"), 128);
  options.enabled = false;
  EXPECT_EQ(after(options, "+-+--"), 1);
}

TEST(LossScaleOptions, ComeFromTheOptionsOfTheRun) {
  Config config;
  EXPECT_FALSE(LossScaleOptions::from(config, DType::kFloat32).enabled);
  EXPECT_FALSE(LossScaleOptions::from(config, DType::kBFloat16).enabled);
  const LossScaleOptions defaults = LossScaleOptions::from(config, DType::kFloat16);
  EXPECT_TRUE(defaults.enabled);
  EXPECT_EQ(defaults.fixed, 0);
  EXPECT_EQ(defaults.initial, 65536);
  EXPECT_EQ(defaults.window, 1000);
  EXPECT_EQ(defaults.hysteresis, 2);
  EXPECT_EQ(defaults.min, 1);
  EXPECT_FALSE(defaults.consecutive_hysteresis);
  config.set("loss_scale.fixed", 8.0);
  config.set("loss_scale.initial", 16.0);
  config.set("loss_scale.window", std::int64_t{7});
  config.set("loss_scale.hysteresis", std::int64_t{3});
  config.set("loss_scale.min", 0.5);
  config.set("loss_scale.consecutive_hysteresis", true);
  const LossScaleOptions given = LossScaleOptions::from(config, DType::kFloat16);
  EXPECT_EQ(given.fixed, 8);
  EXPECT_EQ(given.initial, 16);
  EXPECT_EQ(given.window, 7);
  EXPECT_EQ(given.hysteresis, 3);
  EXPECT_EQ(given.min, 0.5);
  EXPECT_TRUE(given.consecutive_hysteresis);
}

}  // namespace
}  // namespace tessera::optim
