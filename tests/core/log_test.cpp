#include "tessera/core/log.h"

#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tests/support/contains.h"

namespace tessera {
namespace {

class LogTest : public testing::Test {
 protected:
  Logger logger(LogLevel level = LogLevel::kInfo, bool all_ranks = false, LogContext context = {}) {
    LogOptions options;
    options.level = level;
    options.all_ranks = all_ranks;
    options.sink = [this](std::string_view line) { lines_.emplace_back(line); };
    return Logger(std::move(options), context);
  }
  // The line without its time of day.
  std::string line(std::size_t i) const { return lines_.at(i).substr(13); }

  std::vector<std::string> lines_;
};

TEST_F(LogTest, PrefixesRankAndStepWhereThereAreAny) {
  logger(LogLevel::kInfo, true, {2, 4, 17}).info("gathered ", 42, " B");
  logger(LogLevel::kInfo, true, {1, 2}).info("shown");
  logger().with_step(3).info("a");
  logger().warn("alone");
  EXPECT_EQ(line(0), "info  [rank 2 step 17] gathered 42 B\n");
  EXPECT_EQ(line(1), "info  [rank 1] shown\n");
  EXPECT_EQ(line(2), "info  [step 3] a\n");
  EXPECT_EQ(line(3), "warning alone\n");
  EXPECT_EQ(lines_[3].find_first_not_of("0123456789:."), 12U) << "12:34:56.789, then a space";
}

TEST_F(LogTest, RankZeroSpeaksForAllButWarningsOfOthersGetThrough) {
  const Logger quiet = logger(LogLevel::kTrace, false, {1, 2});
  quiet.info("not shown");
  quiet.debug("not shown");
  EXPECT_TRUE(lines_.empty());
  quiet.warn("a warning");
  quiet.error("an error");
  ASSERT_EQ(lines_.size(), 2U);
  EXPECT_EQ(line(1), "error [rank 1] an error\n");
  logger(LogLevel::kInfo, false, {0, 2}).info("rank 0");
  EXPECT_EQ(lines_.size(), 3U);
}

// Counts how often it is turned into text.
struct Counted {
  int* formatted;
};
std::ostream& operator<<(std::ostream& out, const Counted& counted) {
  ++*counted.formatted;
  return out << "counted";
}

TEST_F(LogTest, LinesBelowTheLevelCostNoFormatting) {
  int formatted = 0;
  const Logger quiet = logger(LogLevel::kWarn);
  EXPECT_FALSE(quiet.enabled(LogLevel::kInfo));
  quiet.info(Counted{&formatted});
  quiet.once("key", LogLevel::kInfo, Counted{&formatted});
  EXPECT_EQ(formatted, 0);
  quiet.warn(Counted{&formatted});
  EXPECT_EQ(formatted, 1);
  EXPECT_EQ(lines_.size(), 1U);
}

TEST_F(LogTest, SaysAThingOnceOverAllCopies) {
  const Logger first = logger();
  const Logger second = first.with_step(3);
  first.once("io_uring", LogLevel::kWarn, "io_uring is missing");
  second.once("io_uring", LogLevel::kWarn, "io_uring is missing");
  second.once("other", LogLevel::kWarn, "other");
  EXPECT_EQ(lines_.size(), 2U);
  EXPECT_EQ(line(1), "warning [step 3] other\n");
}

TEST_F(LogTest, LinesOfManyThreadsStayWhole) {
  const Logger shared = logger();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&shared, t] {
      const Logger mine = shared.with_step(t);
      for (int i = 0; i < 200; ++i) {
        mine.info("line ", i);
        mine.once("once", LogLevel::kInfo, "only one");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(lines_.size(), 4 * 200 + 1U);
  for (const std::string& each : lines_) {
    EXPECT_EQ(each.find('\n'), each.size() - 1);
  }
}

TEST(LogOptions, ComeFromTheConfigAndWriteToStderrByDefault) {
  const auto config =
      Config::from_json(R"({"log": {"level": "debug", "all_ranks": true}})", "run.json");
  const LogOptions options = LogOptions::from(config);
  EXPECT_EQ(options.level, LogLevel::kDebug);
  EXPECT_TRUE(options.all_ranks);
  EXPECT_THROW(log_level("loud"), ConfigError);
  testing::internal::CaptureStderr();
  Logger(LogOptions{}).error("to stderr");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_HAS(text, "error to stderr\n");
}

}  // namespace
}  // namespace tessera
