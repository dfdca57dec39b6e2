// `tessera train` as a user runs it, on models that take milliseconds: what it prints and writes,
// and that the number of ranks does not show in the numbers.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

using Json = nlohmann::json;

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

class Train : public ::testing::Test {
 protected:
  ProcessResult train(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "train");
    ProcessOptions options;
    options.directory = directory_.path();
    ProcessResult result = run_tessera(arguments, options);
    EXPECT_FALSE(result.timed_out);
    return result;
  }

  std::vector<Json> lines(const std::string& name) const {
    std::ifstream in(directory_.path() / name);
    std::vector<Json> parsed;
    for (std::string line; std::getline(in, line);) {
      parsed.push_back(Json::parse(line));
    }
    return parsed;
  }

  std::string read_file(const std::string& name) const {
    std::ifstream in(directory_.path() / name, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }

  // Names of spans, alone and with their unit, by the name of their thread or track.
  std::map<std::string, std::set<std::string>> spans_by_track(const std::string& name) const {
    const Json events = Json::parse(read_file(name)).at("traceEvents");
    std::map<std::int64_t, std::string> tracks;
    for (const Json& event : events) {
      if (event.at("name") == "thread_name") {
        tracks[event.at("tid").get<std::int64_t>()] =
            event.at("args").at("name").get<std::string>();
      }
    }
    std::map<std::string, std::set<std::string>> spans;
    for (const Json& event : events) {
      if (event.at("ph") == "X") {
        std::set<std::string>& names = spans[tracks[event.at("tid").get<std::int64_t>()]];
        const auto text = event.at("name").get<std::string>();
        names.insert(text);
        if (event.contains("args") && event.at("args").contains("unit")) {
          names.insert(text + " " + event.at("args").at("unit").get<std::string>());
        }
      }
    }
    return spans;
  }

  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  TemporaryDirectory directory_;
};

TEST(TrainHelp, SaysWhatEveryFlagIs) {
  const ProcessResult result = run_tessera({"train", "--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* flag :
       {"--preset",      "--ranks",      "--steps",       "--batch",         "--seq",
        "--accumulate",  "--precision",  "--lr",          "--clip",          "--seed",
        "--data",        "--config",     "--set",         "--metrics",       "--trace",
        "--unsharded",   "--verify",     "--recompute",   "--tie-head",      "--freeze",
        "--vocab",       "--layers",     "--save-init",   "--save",          "--threads",
        "--device",      "--loss-chunk", "--epochs",      "--width",         "--heads",
        "--model",       "--eval-data",  "--eval-every",  "--eval-batches",  "--stop-on-divergence",
        "--tensorboard", "--log-every",  "--peak-tflops", "--verify-against"}) {
    EXPECT_HAS(result.out, flag);
  }
  EXPECT_HAS(result.out, "readable while it grows, emptied at the start");
  EXPECT_HAS(result.out, "gpt2-124m");
  EXPECT_HAS(result.out, "Examples:\n  tessera train");
}

TEST_F(Train, WithoutFlagsIsADemoThatLearns) {
  const ProcessResult result = train({"--metrics", "run.jsonl"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(count_of(result.out, "\nstep "), 20U) << result.out;
  for (const char* part : {"tokens/s", "median step", "optimizer", "unsharded", "left"}) {
    EXPECT_HAS(result.out, part);
  }
  const std::vector<Json> steps = lines("run.jsonl");
  ASSERT_EQ(steps.size(), 20U);
  EXPECT_LT(steps.back().at("loss").get<double>(), 0.9 * steps.front().at("loss").get<double>());
  EXPECT_EQ(files(), std::set<std::string>{"run.jsonl"});
}

TEST_F(Train, MetricsHaveAllFieldsAndOneLinePerStep) {
  const ProcessResult result =
      train({"--ranks", "2", "--preset", "micro", "--steps", "3", "--batch", "4", "--metrics",
             "run.jsonl", "--trace", "trace.json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::vector<Json> steps = lines("run.jsonl");
  ASSERT_EQ(steps.size(), 3U);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Json& step = steps[i];
    EXPECT_EQ(step.at("step"), i + 1);
    EXPECT_EQ(step.at("tokens"), 64 * (i + 1));
    EXPECT_EQ(step.at("skipped"), false);
    EXPECT_EQ(step.at("loss_scale"), 1.0);
    EXPECT_EQ(step.at("lr"), 0.001);
    for (const char* name :
         {"loss", "grad_norm", "step_s", "forward_s", "backward_s", "update_s", "tokens_per_s",
          "rss_peak_bytes", "full_bytes_peak", "gathered_bytes", "reduced_bytes"}) {
      EXPECT_GT(step.at(name).get<double>(), 0) << name;
    }
    EXPECT_LE(step.at("forward_s").get<double>() + step.at("backward_s").get<double>() +
                  step.at("update_s").get<double>(),
              step.at("step_s").get<double>());
    EXPECT_TRUE(step.at("mfu").is_null());  // no peak of this processor is known
    double held = 0;
    for (const char* tier : {"device", "pinned", "host", "nvme"}) {
      const std::string name = std::string("held_") + tier;
      held += step.at(name + "_bytes").get<double>();
      EXPECT_GE(step.at(name + "_peak_bytes"), step.at(name + "_bytes")) << tier;
    }
    EXPECT_GT(held, 0);
    EXPECT_GE(step.at("exposed_wait_s").get<double>(), 0);
    EXPECT_GT(step.at("prefetch_hits").get<std::int64_t>() +
                  step.at("prefetch_misses").get<std::int64_t>(),
              0);
    // Four sequences of sixteen tokens.
    EXPECT_NEAR(step.at("tokens_per_s").get<double>() * step.at("step_s").get<double>(), 64, 1e-6);
  }
  EXPECT_EQ(files(), (std::set<std::string>{"run.jsonl", "trace.json", "trace.rank1.json"}));
  EXPECT_FALSE(Json::parse(read_file("trace.rank1.json")).at("traceEvents").empty());
  const std::map<std::string, std::set<std::string>> spans = spans_by_track("trace.json");
  EXPECT_EQ(spans.count("main"), 1U);
  for (const char* name : {"step", "forward", "backward", "optimizer step", "update"}) {
    EXPECT_EQ(spans.at("main").count(name), 1U) << name;
  }
  EXPECT_EQ(spans.at("backward of units").count("backward blocks.0"), 1U);
  EXPECT_EQ(spans.at("main").count("forward blocks.0"), 1U);
  // Rank 0 speaks for all.
  EXPECT_EQ(count_of(result.out, "median step"), 1U) << result.out;
}

TEST_F(Train, OneTwoAndNoRanksTrainTheSameNumbers) {
  const std::vector<std::string> common{"--preset", "micro", "--steps",      "4",
                                        "--batch",  "4",     "--accumulate", "2"};
  const auto run = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = common;
    arguments.insert(arguments.end(), {"--metrics", name + ".jsonl", "--save", name + ".st",
                                       "--save-init", name + ".init"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProcessResult result = train(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
  };
  run("one", {"--ranks", "1"});
  run("two", {"--ranks", "2"});
  run("plain", {"--unsharded"});
  EXPECT_EQ(read_file("one.init"), read_file("two.init"));
  EXPECT_EQ(read_file("one.init"), read_file("plain.init"));
  EXPECT_EQ(read_file("one.st"), read_file("plain.st"));
  EXPECT_NE(read_file("one.st"), read_file("one.init"));
  EXPECT_EQ(read_file("two.st").size(), read_file("one.st").size());
  const std::vector<Json> one = lines("one.jsonl");
  const std::vector<Json> two = lines("two.jsonl");
  const std::vector<Json> plain = lines("plain.jsonl");
  ASSERT_EQ(one.size(), 4U);
  ASSERT_EQ(two.size(), 4U);
  ASSERT_EQ(plain.size(), 4U);
  for (std::size_t i = 0; i < one.size(); ++i) {
    for (const char* name : {"loss", "grad_norm"}) {
      const double value = one[i].at(name);
      EXPECT_EQ(plain[i].at(name).get<double>(), value) << name << " of step " << i;
      EXPECT_LT(std::abs(two[i].at(name).get<double>() - value), 2e-6 * value) << name << " " << i;
    }
    EXPECT_EQ(plain[i].at("gathered_bytes"), 0);
    EXPECT_EQ(plain[i].at("exposed_wait_s"), 0.0);
  }
}

TEST_F(Train, VerifyComparesWithUnshardedTraining) {
  const ProcessResult two = train({"--ranks", "2", "--verify", "2", "--batch", "4"});
  EXPECT_EQ(two.exit_code, 0) << two.err << two.out;
  EXPECT_HAS(two.out, "verified: 2 steps of 2 ranks in fp32");
  for (const char* row : {"\nloss ", "\ngrad_norm ", "\nparameters "}) {
    EXPECT_HAS(two.out, row);
  }
  EXPECT_HAS(two.out, "takes the ranks' micro-batches in turn");
  EXPECT_HAS(two.out, "by the norm of its difference over its norm");
  const ProcessResult plain =
      train({"--ranks", "2", "--verify", "2", "--verify-against", "plain", "--batch", "4"});
  EXPECT_EQ(plain.exit_code, 0) << plain.err << plain.out;
  EXPECT_HAS(plain.out, "equal the plain run in one process");
  const ProcessResult one = train({"--verify", "2", "--batch", "4", "--accumulate", "2"});
  EXPECT_EQ(one.exit_code, 0) << one.err << one.out;
  EXPECT_HAS(one.out, "bit for bit");
}

TEST_F(Train, VerifyHoldsInLowPrecision) {
  for (const char* precision : {"bf16", "fp16"}) {
    const ProcessResult result = train({"--ranks", "2", "--preset", "micro", "--verify", "3",
                                        "--batch", "4", "--precision", precision});
    EXPECT_EQ(result.exit_code, 0) << result.err << result.out;
    EXPECT_HAS(result.out, std::string("in ") + precision);
  }
}

// The wire type is one that --verify must see: it changes numbers in the third digit.
TEST_F(Train, VerifyFailsWhereNumbersDiffer) {
  const ProcessResult result =
      train({"--ranks", "2", "--verify", "2", "--batch", "4", "--set", "grad.wire_dtype=bf16"});
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_HAS(result.err, "verification failed: ");
  EXPECT_LACKS(result.out, "verified: ");
}

TEST_F(Train, FlagsWinOverAFile) {
  std::ofstream(directory_.path() / "run.json")
      << R"({"optim": {"lr": 0.5}, "batch": {"micro_per_rank": 3}, "seed": 3})";
  const std::vector<std::string> common{"--preset", "micro",    "--steps",   "1",
                                        "--config", "run.json", "--metrics", "run.jsonl"};
  ASSERT_EQ(train(common).exit_code, 0);
  EXPECT_EQ(lines("run.jsonl").at(0).at("lr"), 0.5);
  std::vector<std::string> with_flags = common;
  with_flags.insert(with_flags.end(), {"--lr", "0.25", "--batch", "2"});
  const ProcessResult result = train(with_flags);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines("run.jsonl").at(0).at("lr"), 0.25);
  EXPECT_HAS(result.out, "of 2 sequences of 16 tokens");
}

TEST_F(Train, InChunksOfTheLossTrainsAsTheWhole) {
  const std::vector<std::string> common = {"--preset",  "micro", "--steps",   "3",
                                           "--threads", "1",     "--metrics", "run.jsonl"};
  const auto losses = [&](const std::vector<std::string>& more) {
    std::vector<std::string> flags = common;
    flags.insert(flags.end(), more.begin(), more.end());
    const ProcessResult result = train(flags);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<double> found;
    for (const Json& step : lines("run.jsonl")) {
      found.push_back(step.at("loss").get<double>());
    }
    return found;
  };
  const std::vector<double> whole = losses({});
  const std::vector<double> chunked = losses({"--loss-chunk", "9"});
  ASSERT_EQ(whole.size(), 3U);
  ASSERT_EQ(chunked.size(), 3U);
  for (std::size_t step = 0; step < whole.size(); ++step) {
    // The promise for fp32 where only orders of summation differ.
    EXPECT_NEAR(chunked[step], whole[step], 2e-6 * whole[step]) << step;
  }
  // The last step has gradients of all before it in it: the flag has arrived.
  EXPECT_NE(chunked, whole);
}

TEST_F(Train, EverySwitchOfTheModelTrains) {
  const ProcessResult result =
      train({"--preset",    "micro",      "--vocab",      "257", "--steps", "2", "--batch",   "2",
             "--recompute", "--tie-head", "--freeze",     "1",   "--seq",   "8", "--threads", "1",
             "--data",      "random",     "--loss-chunk", "5"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "of 8 tokens");
  EXPECT_HAS(result.out, "1 thread\n");
}

}  // namespace
}  // namespace tessera::testing
