// Data, evaluation, shapes and divergence of `tessera train`, as a user meets them.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/low_precision.h"
#include "tests/cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

class TrainData : public ::testing::Test {
 protected:
  using Json = nlohmann::json;

  ProcessResult run(std::vector<std::string> arguments,
                    const std::vector<std::string>& more = {}) const {
    arguments.insert(arguments.end(), more.begin(), more.end());
    ProcessOptions options;
    options.directory = folder_.path();
    return run_tessera(arguments, options);
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_.path() / name, std::ios::binary) << text;
  }
  std::string read_file(const std::string& name) const {
    std::ifstream in(folder_.path() / name, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  std::vector<Json> metrics(const std::string& name) const {
    std::istringstream in(read_file(name));
    std::vector<Json> parsed;
    for (std::string line; std::getline(in, line);) {
      parsed.push_back(Json::parse(line));
    }
    return parsed;
  }

  const TemporaryDirectory folder_;
};

// 5 sequences: of two ranks with 2 at a time, one has none left in the second round.
TEST_F(TrainData, EvaluationIsTheSameOnAllRanksAndChangesNoBit) {
  std::string text;
  for (int i = 0; i < 5 * 16 + 10; ++i) {
    text += static_cast<char>(i * i % 128);
  }
  write("other.txt", text);
  const std::vector<std::string> common{"train", "--preset",    "micro", "--vocab",
                                        "128",   "--steps",     "5",     "--batch",
                                        "4",     "--recompute", "--set", "persist.param_bytes=0"};
  const std::vector<std::string> evaluate{"--eval-data", "other.txt", "--eval-every", "2"};
  const auto train = [&](const std::string& name, std::vector<std::string> more, bool evaluated) {
    more.insert(more.end(), {"--save", name + ".st", "--metrics", name + ".jsonl"});
    if (evaluated) {
      more.insert(more.end(), evaluate.begin(), evaluate.end());
    }
    const ProcessResult result = run(common, more);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(contains(result.out, "evaluated on 5 sequences, data: text:other.txt"), evaluated)
        << result.out;
    EXPECT_EQ(contains(result.out, "eval loss "), evaluated) << result.out;
  };
  train("one", {"--ranks", "1"}, false);
  train("two", {"--ranks", "2"}, false);
  train("one_eval", {"--ranks", "1"}, true);
  train("two_eval", {"--ranks", "2"}, true);
  train("plain_eval", {"--unsharded"}, true);
  EXPECT_EQ(read_file("one.st"), read_file("one_eval.st"));
  EXPECT_EQ(read_file("one.st"), read_file("plain_eval.st"));
  EXPECT_EQ(read_file("two.st"), read_file("two_eval.st"));

  const std::vector<Json> one = metrics("one_eval.jsonl");
  const std::vector<Json> two = metrics("two_eval.jsonl");
  const std::vector<Json> plain = metrics("plain_eval.jsonl");
  ASSERT_EQ(one.size(), 5U);
  EXPECT_FALSE(one[0].contains("eval_loss"));
  EXPECT_FALSE(one[2].contains("eval_loss"));
  for (const std::size_t step : {1U, 3U, 4U}) {  // by --eval-every, and the last
    const double loss = one[step].at("eval_loss");
    EXPECT_GT(loss, 0);
    EXPECT_EQ(plain[step].at("eval_loss").get<double>(), loss);
    // The promise of fp32 where only the order of sums differs.
    EXPECT_NEAR(two[step].at("eval_loss").get<double>(), loss, 2e-6 * loss);
  }
  EXPECT_NE(one[1].at("eval_loss"), one[3].at("eval_loss")) << "training shows";
  // What an evaluation gathered is not told as the next step's. The step after the first evaluation
  // gathers more, since prefetch does not know that order yet.
  const std::vector<Json> quiet = metrics("two.jsonl");
  EXPECT_EQ(two[4].at("gathered_bytes"), quiet[4].at("gathered_bytes"));
}

TEST_F(TrainData, GeneratedDataIsEvaluatedOnOtherSequencesThanItIsTrainedOn) {
  const ProcessResult result =
      run({"train", "--preset", "micro", "--steps", "1", "--batch", "2", "--lr", "0", "--eval-data",
           "demo", "--eval-batches", "1", "--metrics", "run.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json step = metrics("run.jsonl").at(0);
  EXPECT_NE(step.at("eval_loss"), step.at("loss"));
}

TEST_F(TrainData, EpochsAreStepsOverAllFiles) {
  write("a.txt", std::string(16 * 5 + 1, 'a'));
  std::filesystem::create_directory(folder_.path() / "more");
  write("more/b.txt", std::string(16 * 4 + 9, 'b'));
  const ProcessResult result =
      run({"train", "--preset", "micro", "--vocab", "128", "--batch", "2", "--epochs", "3",
           "--data", "a.txt", "--data", "text:more", "--metrics", "run.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out,
             "12 steps of 2 sequences of 16 tokens, data: text:a.txt, "
             "text:more/b.txt\n3 epochs of 4 steps over 9 sequences, "
             "without 1 that fills no batch\n");
  EXPECT_EQ(metrics("run.jsonl").size(), 12U);
}

TEST_F(TrainData, ADivergedRunSaysSoAndHasAnExitCodeOfItsOwn) {
  const std::vector<std::string> common{"train",  "--preset", "micro",     "--lr",     "1e30",
                                        "--save", "last.st",  "--metrics", "run.jsonl"};
  for (const char* ranks : {"1", "2"}) {
    const ProcessResult result = run(common, {"--ranks", ranks, "--steps", "6"});
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_HAS(result.err, "training diverged: ");
    EXPECT_HAS(result.err, "try a lower learning rate");
    EXPECT_HAS(result.err, "; --save was written");
    EXPECT_EQ(metrics("run.jsonl").size(), 6U);
    EXPECT_TRUE(std::filesystem::remove(folder_.path() / "last.st"));
  }
}

TEST_F(TrainData, ADivergedRunStopsIfAsked) {
  const ProcessResult result =
      run({"train", "--preset", "micro", "--lr", "1e30", "--ranks", "2", "--steps", "100",
           "--stop-on-divergence", "--metrics", "run.jsonl"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  const std::vector<Json> steps = metrics("run.jsonl");
  EXPECT_GE(steps.size(), 10U);
  EXPECT_LT(steps.size(), 20U);
  EXPECT_EQ(steps.back().at("skipped"), true);
}

TEST_F(TrainData, ParametersThatAreNoNumbersAreNotSaved) {
  write("last.st", "what was there before");
  const ProcessResult result = run({"train", "--preset", "micro", "--lr", "1e30", "--steps", "4",
                                    "--set", "grad.skip_nonfinite=false", "--save", "last.st"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_HAS(result.err, "; --save was not written");
  EXPECT_EQ(read_file("last.st"), "what was there before");
}

TEST_F(TrainData, AModelHasTheShapeOfFlagsOrOfAFile) {
  write("config.json", R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 3,
                           "n_positions": 8, "vocab_size": 40, "activation_function": "gelu_new"})");
  const std::vector<std::string> file{"--model", "config.json", "--heads", "4"};
  const std::vector<std::string> flags{"--width", "48", "--heads", "4",  "--layers",  "1",
                                       "--seq",   "8",  "--vocab", "40", "--tie-head"};
  const std::vector<std::string> common{"train", "--steps", "2", "--batch", "2", "--save"};
  const ProcessResult by_file = run(common, [&] {
    std::vector<std::string> all{"file.st"};
    all.insert(all.end(), file.begin(), file.end());
    return all;
  }());
  ASSERT_EQ(by_file.exit_code, 0) << by_file.err;
  EXPECT_HAS(by_file.out, "config.json, heads 4: ");
  EXPECT_HAS(by_file.err,
             "tessera: warning: --model \"config.json\": activation "
             "gelu_new becomes gelu");
  const ProcessResult by_flags = run(common, [&] {
    std::vector<std::string> all{"flags.st"};
    all.insert(all.end(), flags.begin(), flags.end());
    return all;
  }());
  ASSERT_EQ(by_flags.exit_code, 0) << by_flags.err;
  EXPECT_HAS(by_flags.out, "tiny, width 48, heads 4: ");
  EXPECT_EQ(read_file("file.st"), read_file("flags.st"));

  const ProcessResult inspected = run({"inspect"}, file);
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_HAS(inspected.out, "config.json, heads 4");
}

// Whether there is a warning depends on this machine's processor.
TEST_F(TrainData, LowPrecisionOnAProcessorWithoutUnitsIsWarnedAboutOnce) {
  const std::string expected =
      cli::slow_precision_text(cli::read_low_precision_units(), DType::kBFloat16);
  const ProcessResult result = run({"train", "--preset", "micro", "--steps", "1", "--batch", "2",
                                    "--precision", "bf16", "--seq", "4", "--ranks", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string line = "tessera: warning: " + expected + "\n";
  EXPECT_EQ(contains(result.err, "tessera: warning: "), !expected.empty()) << result.err;
  if (!expected.empty()) {
    EXPECT_HAS(result.err, line);
    EXPECT_EQ(result.err.find(line), result.err.rfind(line)) << result.err;
  }
  EXPECT_LACKS(result.err, "frame #");
}

}  // namespace
}  // namespace tessera::testing
