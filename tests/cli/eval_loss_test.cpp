// How the loss of an evaluation is shown and written.
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/metrics.h"
#include "cli/progress.h"
#include "testing/manual_clock.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

TEST(EvalLoss, IsAFieldOfTheStepsThatHaveOne) {
  StepMetrics metrics;
  EXPECT_FALSE(nlohmann::json::parse(metrics_json(metrics)).contains("eval_loss"));
  metrics.eval_loss = 0.1 + 0.2;
  EXPECT_EQ(nlohmann::json::parse(metrics_json(metrics)).at("eval_loss").get<double>(), 0.1 + 0.2);
  metrics.eval_loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(nlohmann::json::parse(metrics_json(metrics)).at("eval_loss").is_null());
}

TEST(EvalLoss, IsAlwaysShownAndStaysOnATerminal) {
  std::vector<std::string> printed;
  ProgressOptions options;
  options.num_steps = 1000;
  options.terminal = true;
  options.print = [&printed](std::string_view text) { printed.emplace_back(text); };
  ManualClock clock;
  Progress progress(options, clock);
  StepMetrics metrics;
  progress.show(metrics);
  metrics.step = 2;
  progress.show(metrics);
  ASSERT_EQ(printed.size(), 1U) << "no time has passed";
  metrics.step = 3;
  metrics.eval_loss = 3.25;
  progress.show(metrics);
  ASSERT_EQ(printed.size(), 2U);
  EXPECT_HAS(printed[1], "eval loss 3.2500");
  EXPECT_EQ(printed[1].back(), '\n');
}

}  // namespace
}  // namespace tessera::cli
