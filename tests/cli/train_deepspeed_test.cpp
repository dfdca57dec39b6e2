// DeepSpeed's files in real runs: what the program says, that flags win, and the learning rates.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/refusal.h"
#include "tests/support/contains.h"

namespace tessera::testing {
namespace {

class TrainDeepSpeed : public Refusal {
 protected:
  static std::string shape(const std::string& name) {
    return (std::filesystem::path(TESSERA_SOURCE_DIR) / "tests/core/deepspeed/accepted" /
            (name + ".json"))
        .string();
  }

  ProcessResult train(const std::vector<std::string>& flags, const char* steps = "3") {
    std::vector<std::string> arguments{"train",   "--preset", "micro",     "--threads", "1",
                                       "--steps", steps,      "--metrics", "run.jsonl"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    ProcessOptions options;
    options.directory = place_.path();
    return run_tessera(arguments, options);
  }

  std::vector<double> learning_rates() const {
    std::vector<double> rates;
    std::ifstream file(place_.path() / "run.jsonl");
    for (std::string line; std::getline(file, line);) {
      rates.push_back(nlohmann::json::parse(line).at("lr").get<double>());
    }
    return rates;
  }

  TemporaryDirectory place_;
};

TEST_F(TrainDeepSpeed, AFileOfAutosTrainsAShortRunWithoutAWarning) {
  const ProcessResult result = train({"--config", shape("zero3_all_auto"), "--lr", "0.5"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_LE(result.err_lines().size(), 10U) << result.err;
  EXPECT_LACKS(result.err, "warn");
  EXPECT_EQ(learning_rates(), (std::vector<double>{0.5, 0.5, 0.5})) << "no warm-up was asked for";
}

TEST_F(TrainDeepSpeed, EverySubjectAtOnceTakesTenLinesAtMost) {
  const ProcessResult result =
      train({"--config", shape("every_subject"), "--optimizer", "host", "--set", "nvme.paths="});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> lines = result.err_lines();
  // What the processor lacks is not about the file.
  const auto num_lines = std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return !contains(line, "this CPU has no");
  });
  EXPECT_LE(num_lines, 10) << result.err;
  EXPECT_HAS(result.err, "not built yet, and without effect: quant.weights (");
  EXPECT_HAS(result.err, "--tensorboard DIR` for tensorboard");
  EXPECT_HAS(result.err,
             "schedule.warmup_steps = 1000 (a default, DeepSpeed's) is more than the 3 "
             "steps of the run");
}

TEST_F(TrainDeepSpeed, FlagsWinOverTheFileAndTheLogShowsWhatHolds) {
  const ProcessResult result = train({"--config", shape("monitors"), "--batch", "6"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "of 6 sequences");
  EXPECT_HAS(result.err,
             "training: batch.total = 6 (--batch, not train_batch_size = 16), "
             "batch.micro_per_rank = 3 (derived, not train_micro_batch_size_per_gpu = "
             "4), batch.accumulate = 2");
}

TEST_F(TrainDeepSpeed, SizesOfOneElementTrainOnSeveralRanks) {
  const ProcessResult result = train({"--config", shape("tiny_sizes"), "--ranks", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.err, "grad.bucket_bytes = 1MiB (the least, for reduce_bucket_size");
}

// Our own option is taken at its word, but nobody should have to guess why a step takes so long.
TEST_F(TrainDeepSpeed, BucketsThatMakeVeryManyCallsAreMentioned) {
  const ProcessResult result = train({"--ranks", "2", "--set", "grad.bucket_bytes=160"}, "1");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(
      contains(result.err, "grad.bucket_bytes = 160B (command line) cuts the gradients into"))
      << result.err;
}

TEST_F(TrainDeepSpeed, ARunWithoutShardsSaysTheSameOfItsSchedule) {
  const ProcessResult result =
      train({"--unsharded", "--config", shape("warmup_decay"), "--set", "schedule.total_steps=9"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.err, "end within the warm-up, schedule.warmup_steps = 500");
}

TEST_F(TrainDeepSpeed, BatchesThatContradictNameTheThreeValuesAndWhereTheyCameFrom) {
  write("ds.json", R"({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
                       "gradient_accumulation_steps": 1})");
  expect_refusal({"train", "--config", "ds.json", "--ranks", "2"},
                 "batch.total = 16 (ds.json: train_batch_size) is not batch.micro_per_rank = 4 "
                 "(ds.json: train_micro_batch_size_per_gpu) times batch.accumulate = 1 (ds.json: "
                 "gradient_accumulation_steps) times 2 ranks, which is 8; change one of them or "
                 "leave it out");
  write("two.json", R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})");
  expect_refusal({"train", "--config", "two.json"}, "batch.accumulate = 1 (a default)");
}

TEST_F(TrainDeepSpeed, FlagsOfTheScheduleSetItsOptions) {
  const ProcessResult result = train({"--lr", "8", "--lr-start", "2", "--lr-min", "4", "--warmup",
                                      "2", "--schedule", "linear", "--schedule-steps", "4"},
                                     "5");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(learning_rates(), (std::vector<double>{2, 5, 8, 6, 4}));
  expect_refusal({"train", "--schedule", "cosin"}, "did you mean cosine?");
  expect_refusal({"train", "--warmup", "50", "--steps", "20"},
                 "schedule.warmup_steps = 50 (--warmup) is more than the 20 steps of the run");
  const ProcessResult help = run_tessera_forked({"train", "--help"});
  const auto group = help.out.find("Learning rate");
  ASSERT_NE(group, std::string::npos) << help.out;
  for (const char* flag : {"--lr ", "--schedule ", "--warmup ", "--warmup-shape ", "--lr-start ",
                           "--lr-min ", "--schedule-steps "}) {
    EXPECT_NE(help.out.find(flag, group), std::string::npos) << flag;
  }
}

}  // namespace
}  // namespace tessera::testing
