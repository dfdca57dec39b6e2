// What one sees of a run of `tessera train`, and that losing sight of it costs nothing.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/metrics.h"
#include "tests/cli/program.h"
#include "tests/cli/refusal.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

class TrainWatched : public ::testing::Test {
 protected:
  ProcessResult run(const std::vector<std::string>& arguments) {
    ProcessOptions options;
    options.directory = directory_.path();
    return run_tessera(arguments, options);
  }

  std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
    std::vector<std::string> found;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      if (contains(line, part)) {
        found.push_back(line);
      }
    }
    return found;
  }

  TemporaryDirectory directory_;
};

TEST_F(TrainWatched, AFullDiskUnderTheMetricsCostsNeitherTheRunNorTheModel) {
  if (::access("/dev/full", W_OK) != 0) {
    GTEST_SKIP() << "there is no /dev/full";
  }
  std::filesystem::create_symlink("/dev/full", directory_.path() / "run.jsonl");
  const ProcessResult result =
      run({"train", "--ranks", "2", "--preset", "micro", "--steps", "4", "--metrics", "run.jsonl",
           "--tensorboard", "board", "--save", "model.safetensors"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> warnings = lines_with(result.err, "cannot be written");
  ASSERT_EQ(warnings.size(), 1U) << result.err;
  EXPECT_HAS(warnings[0], "--metrics \"run.jsonl\"");
  EXPECT_HAS(result.out, "\n4 steps in ");
  EXPECT_TRUE(std::filesystem::exists(directory_.path() / "model.safetensors"));
  std::size_t num_boards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path() / "board")) {
    EXPECT_GT(std::filesystem::file_size(entry.path()), 4U * 100U);
    ++num_boards;
  }
  EXPECT_EQ(num_boards, 1U);  // rank 0's
}

TEST_F(TrainWatched, AGivenPeakAndALineEverySoManySteps) {
  const ProcessResult result =
      run({"train", "--preset", "micro", "--steps", "5", "--batch", "2", "--log-every", "2",
           "--peak-tflops", "1e-6", "--metrics", "run.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> lines = lines_with(result.out, " left");
  ASSERT_EQ(lines.size(), 3U) << result.out;
  EXPECT_EQ(lines[0].rfind("step 2/5", 0), 0U);
  EXPECT_EQ(lines[1].rfind("step 4/5", 0), 0U);
  EXPECT_EQ(lines[2].rfind("step 5/5", 0), 0U);
  // 6 * (2 blocks of 12 * 32^2 and a head of 64 * 32) + 12 * 2 * 32 * 16 operations per token.
  constexpr double kFlopsPerToken = 6 * (2 * 12 * 1024 + 64 * 32) + 12 * 2 * 32 * 16;
  std::ifstream in(directory_.path() / "run.jsonl");
  std::size_t num_lines = 0;
  for (std::string line; std::getline(in, line); ++num_lines) {
    const auto step = nlohmann::json::parse(line);
    const double expected = kFlopsPerToken * step.at("tokens_per_s").get<double>() / 1e6;
    EXPECT_NEAR(step.at("mfu").get<double>(), expected, 1e-9 * expected);
  }
  EXPECT_EQ(num_lines, 5U);
}

TEST_F(TrainWatched, AWarningTheScreenAndTheMetricsCountStepsFromOne) {
  const ProcessResult result =
      run({"train", "--preset", "micro", "--steps", "1", "--batch", "1", "--precision", "fp16",
           "--set", "loss_scale.initial=1e30", "--metrics", "run.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.err, "[step 1] a gradient is infinite");
  EXPECT_HAS(result.out, "\nstep 1/1 ");
  EXPECT_EQ(nlohmann::json::parse(read_whole(directory_.path() / "run.jsonl")).at("step"), 1);
}

TEST_F(TrainWatched, EveryFieldOfTheMetricsIsInTheDocument) {
  const auto fields = nlohmann::json::parse(cli::metrics_json({}));
  const std::string text =
      read_whole(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/metrics.md");
  for (const auto& [name, value] : fields.items()) {
    EXPECT_HAS(text, "\n| `" + name + "` | ");
  }
}

class PlotUsage : public Refusal {};

TEST_F(PlotUsage, FilesThatAreNoMetricsAreRefused) {
  write("run.jsonl", "{\"step\": 1}\n");
  write("prose.txt", "no metrics\n");
  expect_refusal({"plot", "run.jsonl", "nowhere.jsonl"}, "cannot open \"nowhere.jsonl\"");
  expect_refusal({"plot", "."}, "is a directory");
  expect_refusal({"plot", "prose.txt"}, "has no line that describes a step");
  expect_refusal({"plot", "run.jsonl", "run.jsonl"}, "named twice");
  expect_refusal({"plot", "run.jsonl", "--out", "run.jsonl"}, "is one of the files to read");
  expect_refusal({"plot", "run.jsonl", "--out", "nowhere/page.html"}, "there is no directory");
  expect_refusal({"plot"}, "FILES");
}

TEST_F(TrainWatched, PlotMakesAPageOfSeveralRuns) {
  std::ofstream(directory_.path() / "one.jsonl") << "{\"step\": 1, \"loss\": 2.5}\n";
  std::ofstream(directory_.path() / "two.jsonl") << "{\"step\": 1, \"loss\": 2.25}\n{\"ste";
  const ProcessResult result = run({"plot", "one.jsonl", "two.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            "one.jsonl: 1 step\ntwo.jsonl: 1 step, last line not complete\n"
            "wrote one.html; open it in a browser\n");
  const std::string page = read_whole(directory_.path() / "one.html");
  EXPECT_EQ(page.rfind("<!DOCTYPE html>", 0), 0U);
  EXPECT_HAS(page, "\"mean\":[2.25]");
  EXPECT_HAS(page, "</html>");
}

}  // namespace
}  // namespace tessera::testing
