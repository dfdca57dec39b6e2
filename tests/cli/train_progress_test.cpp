// What a person sees of a run, on a clock that the test moves.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/progress.h"
#include "testing/manual_clock.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

StepMetrics some_step(std::int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = 5.41234;
  metrics.grad_norm = 1.5;
  metrics.lr = 0.001;
  metrics.tokens_per_s = 12345;
  metrics.rss_peak_bytes = std::int64_t{3} << 20;
  return metrics;
}

class ProgressTest : public ::testing::Test {
 protected:
  ProgressOptions options(std::int64_t num_steps, bool terminal) {
    ProgressOptions options;
    options.num_steps = num_steps;
    options.terminal = terminal;
    options.width = 120;
    options.print = [this](std::string_view text) { printed_.emplace_back(text); };
    return options;
  }

  // Steps that take this long each; what was printed.
  const std::vector<std::string>& run(Progress& progress, std::int64_t num_steps,
                                      std::int64_t step_ms) {
    for (std::int64_t step = 1; step <= num_steps; ++step) {
      clock_.advance_ns(step_ms * kMillisecond);
      progress.show(some_step(step));
    }
    return printed_;
  }

  ManualClock clock_;
  std::vector<std::string> printed_;
};

TEST(ProgressText, CountsHaveThreeDigits) {
  EXPECT_EQ(count_text(0), "0");
  EXPECT_EQ(count_text(999.4), "999");
  EXPECT_EQ(count_text(999.5), "1.00k");
  EXPECT_EQ(count_text(12345), "12.3k");
  EXPECT_EQ(count_text(99960), "100k");
  EXPECT_EQ(count_text(4.56e6), "4.56M");
  EXPECT_EQ(count_text(1.3e9), "1.30G");
}

TEST(ProgressText, DurationsAreThoseOfAClock) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(7.4), "0:07");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(725), "12:05");
  EXPECT_EQ(duration_text(10921), "3:02:01");
  EXPECT_EQ(duration_text(-1), "0:00");
}

TEST(ProgressText, ALineSaysEverythingOnce) {
  EXPECT_EQ(progress_line(some_step(3), 200, 65),
            "step   3/200  loss 5.4123  norm 1.5  lr 0.001  12.3k tokens/s  3.00 MiB  1:05 left");
}

TEST(ProgressText, ASkippedStepSaysWhy) {
  StepMetrics metrics = some_step(1);
  metrics.skipped = true;
  metrics.loss_scale = 32768;
  EXPECT_HAS(progress_line(metrics, 5, 0), "skipped: gradient not finite, loss scale 32768");
}

// The time left is that of the steps which are left, by those of this part of the run.
TEST_F(ProgressTest, ARunThatGoesOnCountsItsOwnTime) {
  ProgressOptions resumed = options(200, false);
  resumed.num_done = 100;
  Progress progress(resumed, clock_);
  for (std::int64_t step = 101; step <= 104; ++step) {
    clock_.advance_ns((step == 101 ? 9000 : 1000) * kMillisecond);
    progress.show(some_step(step));
  }
  ASSERT_EQ(printed_.size(), 4U);
  EXPECT_HAS(printed_[0], "step 101/200 ");
  EXPECT_HAS(printed_[3], "1:36 left");
}

TEST_F(ProgressTest, AnythingElseHasALineOfItsOwn) {
  Progress progress(options(100, true), clock_);
  progress.show(some_step(1));
  progress.say("something else");
  ASSERT_EQ(printed_.size(), 3U);
  EXPECT_EQ(printed_[1], "\n");
  EXPECT_EQ(printed_[2], "something else\n");
}

TEST_F(ProgressTest, AShortRunPrintsEveryStepWhenPiped) {
  Progress progress(options(20, false), clock_);
  const auto& lines = run(progress, 20, 1);
  ASSERT_EQ(lines.size(), 20U);
  for (const std::string& line : lines) {
    EXPECT_LACKS(line, "\r");
    EXPECT_EQ(line.find('\n'), line.size() - 1);
  }
}

TEST_F(ProgressTest, ALongRunPrintsFirstLastAndOnePerSecondWhenPiped) {
  Progress progress(options(1000, false), clock_);
  const auto& lines = run(progress, 1000, 10);
  // The first at 10 ms, then one per second until 9.01 s, and the last at 10 s.
  ASSERT_EQ(lines.size(), 11U);
  EXPECT_EQ(lines[0].rfind("step    1/1000", 0), 0U) << lines[0];
  EXPECT_EQ(lines[1].rfind("step  101/1000", 0), 0U) << lines[1];
  EXPECT_EQ(lines[10].rfind("step 1000/1000", 0), 0U) << lines[10];
}

TEST_F(ProgressTest, ASkippedStepIsAlwaysShown) {
  Progress progress(options(1000, false), clock_);
  progress.show(some_step(1));
  StepMetrics skipped = some_step(2);
  skipped.skipped = true;
  progress.show(skipped);
  EXPECT_EQ(printed_.size(), 2U);
}

// Of what was printed, the lines that a terminal still shows at the end.
std::vector<std::string> lines_that_stay(const std::vector<std::string>& printed) {
  std::vector<std::string> lines(1);
  for (const std::string& text : printed) {
    for (const char c : text) {
      if (c == '\r') {
        lines.back().clear();
      } else if (c == '\n') {
        lines.emplace_back();
      } else {
        lines.back() += c;
      }
    }
  }
  EXPECT_EQ(lines.back(), "") << "the last line is not ended";
  lines.pop_back();
  return lines;
}

TEST_F(ProgressTest, ATerminalRewritesALineAndKeepsTenAsTheHistory) {
  {
    Progress progress(options(200, true), clock_);
    run(progress, 200, 200);
  }
  EXPECT_EQ(printed_.size(), 200U);
  for (const std::string& text : printed_) {
    EXPECT_EQ(text.rfind("\rstep ", 0), 0U) << text;
  }
  const std::vector<std::string> lines = lines_that_stay(printed_);
  ASSERT_EQ(lines.size(), 10U);
  EXPECT_EQ(lines.front().rfind("step  20/200", 0), 0U) << lines.front();
  EXPECT_EQ(lines.back().rfind("step 200/200", 0), 0U) << lines.back();
}

TEST_F(ProgressTest, ARunOfAFewStepsKeepsAllOfThem) {
  Progress progress(options(3, true), clock_);
  run(progress, 3, 1);
  EXPECT_EQ(lines_that_stay(printed_).size(), 3U);
}

TEST_F(ProgressTest, ALineEverySoManyStepsStaysOnATerminalAndInAPipe) {
  for (const bool terminal : {true, false}) {
    printed_.clear();
    {
      ProgressOptions given = options(100, terminal);
      given.log_every = 30;
      Progress progress(given, clock_);
      run(progress, 100, 2000);
    }
    const std::vector<std::string> lines = lines_that_stay(printed_);
    ASSERT_EQ(lines.size(), 4U) << terminal;
    const char* const begins[] = {"step  30/100", "step  60/100", "step  90/100", "step 100/100"};
    for (std::size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i].rfind(begins[i], 0), 0U) << lines[i];
    }
  }
}

TEST_F(ProgressTest, ATerminalIsNotRedrawnMoreThanTenTimesASecond) {
  Progress progress(options(1000, true), clock_);
  std::size_t num_rewritten = 0;
  for (const std::string& text : run(progress, 1000, 1)) {
    num_rewritten += text.back() == '\n' ? 0 : 1;
  }
  // The first, and one each 100 ms that has not just been drawn for the history.
  EXPECT_LE(num_rewritten, 11U);
}

TEST(ProgressText, TheRemainingTimeIsTheLastThatANarrowLineLoses) {
  StepMetrics metrics = some_step(123456);
  metrics.grad_norm = 1234.5;
  metrics.rss_peak_bytes = std::int64_t{123} << 30;
  const auto at = [&metrics](std::size_t width) {
    return progress_line(metrics, 1000000, 86399, width);
  };
  EXPECT_EQ(at(79), "step  123456/1000000  loss 5.4123  norm 1234  12.3k tokens/s  23:59:59 left");
  EXPECT_EQ(at(60), "step  123456/1000000  loss 5.4123  23:59:59 left");
  EXPECT_EQ(at(40), "step  123456/1000000  23:59:59 left");
  EXPECT_EQ(at(30), "step  123456/1000000  23:59:59");
  EXPECT_EQ(at(200), progress_line(metrics, 1000000, 86399));
}

TEST_F(ProgressTest, ALineNeverFillsTheLastColumn) {
  ProgressOptions narrow = options(20, true);
  narrow.width = 30;
  Progress progress(narrow, clock_);
  progress.show(some_step(1));
  // Carriage return, "step  1/20" and the time, erase to the end of the line.
  EXPECT_EQ(printed_.at(0), "\rstep  1/20  0:00 left\x1b[K");
}

TEST_F(ProgressTest, AnExceptionLeavesTheNextLineFree) {
  try {
    Progress progress(options(20, true), clock_);
    progress.show(some_step(1));
    throw 1;
  } catch (int) {  // its way through Progress is the test
  }
  EXPECT_EQ(printed_.back(), "\n");
}

TEST_F(ProgressTest, RemainingTimeLeavesTheSlowFirstStepOut) {
  Progress progress(options(4, false), clock_);
  clock_.advance_ns(60'000 * kMillisecond);
  progress.show(some_step(1));
  EXPECT_HAS(printed_.back(), "3:00 left");
  clock_.advance_ns(5'000 * kMillisecond);
  progress.show(some_step(2));
  EXPECT_HAS(printed_.back(), "0:10 left");
}

TEST_F(ProgressTest, AnEvaluationIsAlwaysShownAndStaysOnATerminal) {
  Progress progress(options(1000, true), clock_);
  progress.show(some_step(1));
  progress.show(some_step(2));
  ASSERT_EQ(printed_.size(), 1U) << "no time has passed";
  StepMetrics metrics = some_step(3);
  metrics.eval_loss = 3.25;
  progress.show(metrics);
  ASSERT_EQ(printed_.size(), 2U);
  EXPECT_HAS(printed_[1], "eval loss 3.2500");
  EXPECT_EQ(printed_[1].back(), '\n');
}

}  // namespace
}  // namespace tessera::cli
