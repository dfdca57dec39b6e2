// `tessera train` as a user runs it, on models that take milliseconds: what it prints and writes,
// data and evaluation, DeepSpeed's files, and that the number of ranks does not show in the
// numbers.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/low_precision.h"
#include "cli/metrics.h"
#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
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

// A DeepSpeed file of tests/core.
std::string shape(const std::string& name) {
  return std::string(TESSERA_SOURCE_DIR) + "/tests/core/deepspeed/accepted/" + name + ".json";
}

class Train : public ProgramTest {
 protected:
  // Must end well.
  ProcessResult train(const Arguments& flags) const { return run_well({"train"}, flags); }
  ProcessResult train_steps(const Arguments& flags, const char* steps = "3") const {
    return train(
        joined({"--preset", "micro", "--threads", "1", "--steps", steps, "--metrics", "run.jsonl"},
               flags));
  }

  std::vector<double> learning_rates() const {
    std::vector<double> rates;
    for (const Json& step : lines("run.jsonl")) {
      rates.push_back(step.at("lr").get<double>());
    }
    return rates;
  }

  // Names of spans, alone and with their unit, by the name of their thread or track.
  std::map<std::string, std::set<std::string>> spans_by_track(const std::string& name) const {
    const Json events = Json::parse(read(name)).at("traceEvents");
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
};

TEST_F(Train, HelpSaysWhatEveryFlagIs) {
  const ProcessResult result = run_tessera_forked({"train", "--help"});
  for (
      const char* flag :
      {"--preset",      "--ranks",      "--steps",       "--batch",          "--seq",
       "--accumulate",  "--precision",  "--lr",          "--clip",           "--seed",
       "--data",        "--config",     "--set",         "--metrics",        "--trace",
       "--unsharded",   "--verify",     "--recompute",   "--tie-head",       "--freeze",
       "--vocab",       "--layers",     "--save-init",   "--save",           "--threads",
       "--device",      "--loss-chunk", "--epochs",      "--width",          "--heads",
       "--model",       "--eval-data",  "--eval-every",  "--eval-batches",   "--stop-on-divergence",
       "--tensorboard", "--log-every",  "--peak-tflops", "--verify-against", "--checkpoint",
       "--save-every",  "--keep",       "--resume",      "--partial",        "--save-async",
       "--save-memory", "--stop-after", "--init",        "--adapters",       "--adapter-alpha",
       "--freeze-base"}) {
    EXPECT_HAS(result.out, flag);
  }
  EXPECT_HAS(result.out, "readable while it grows, emptied at the start");
  EXPECT_HAS(result.out, "gpt2-124m");
  EXPECT_HAS(result.out, "Examples:\n  tessera train");
}

TEST_F(Train, WithoutFlagsIsADemoThatLearns) {
  const ProcessResult result = train({"--metrics", "run.jsonl"});
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
    EXPECT_TRUE(step.at("mfu").is_null());  // no peak of this CPU is known
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
  EXPECT_FALSE(Json::parse(read("trace.rank1.json")).at("traceEvents").empty());
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
  const Arguments common{"--preset", "micro", "--steps", "4", "--batch", "4", "--accumulate", "2"};
  const auto run_as = [&](const std::string& name, const Arguments& more) {
    train(joined(joined(common, more), {"--metrics", name + ".jsonl", "--save", name + ".st",
                                        "--save-init", name + ".init"}));
  };
  run_as("one", {"--ranks", "1"});
  run_as("two", {"--ranks", "2"});
  run_as("plain", {"--unsharded"});
  EXPECT_EQ(read("one.init"), read("two.init"));
  EXPECT_EQ(read("one.init"), read("plain.init"));
  EXPECT_EQ(read("one.st"), read("plain.st"));
  EXPECT_NE(read("one.st"), read("one.init"));
  EXPECT_EQ(read("two.st").size(), read("one.st").size());
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
  EXPECT_HAS(two.out, "verified: 2 steps of 2 ranks in fp32");
  for (const char* row : {"\nloss ", "\ngrad_norm ", "\nparameters "}) {
    EXPECT_HAS(two.out, row);
  }
  EXPECT_HAS(two.out, "takes the ranks' micro-batches in turn");
  EXPECT_HAS(two.out, "by the norm of its difference over its norm");
  const ProcessResult plain =
      train({"--ranks", "2", "--verify", "2", "--verify-against", "plain", "--batch", "4"});
  EXPECT_HAS(plain.out, "equal the plain run in one process");
  const ProcessResult one = train({"--verify", "2", "--batch", "4", "--accumulate", "2"});
  EXPECT_HAS(one.out, "bit for bit");
}

TEST_F(Train, VerifyHoldsInLowPrecision) {
  for (const char* precision : {"bf16", "fp16"}) {
    const ProcessResult result = train({"--ranks", "2", "--preset", "micro", "--verify", "3",
                                        "--batch", "4", "--precision", precision});
    EXPECT_HAS(result.out, std::string("in ") + precision);
  }
}

// The wire type is one that --verify must see: it changes numbers in the third digit.
TEST_F(Train, VerifyFailsWhereNumbersDiffer) {
  const ProcessResult result = run(
      {"train", "--ranks", "2", "--verify", "2", "--batch", "4", "--set", "grad.wire_dtype=bf16"});
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_HAS(result.err, "verification failed: ");
  EXPECT_LACKS(result.out, "verified: ");
}

TEST_F(Train, InChunksOfTheLossTrainsAsTheWhole) {
  const auto losses = [this](const Arguments& flags) {
    train_steps(flags);
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
  EXPECT_HAS(result.out, "of 8 tokens");
  EXPECT_HAS(result.out, "1 thread\n");
}

// --- data and evaluation ---

// 5 sequences: of two ranks with 2 at a time, one has none left in the second round.
TEST_F(Train, EvaluationIsTheSameOnAllRanksAndChangesNoBit) {
  std::string text;
  for (int i = 0; i < 5 * 16 + 10; ++i) {
    text += static_cast<char>(i * i % 128);
  }
  write("other.txt", text);
  const Arguments common{"train", "--preset",    "micro", "--vocab",
                         "128",   "--steps",     "5",     "--batch",
                         "4",     "--recompute", "--set", "persist.param_bytes=0"};
  const Arguments evaluate{"--eval-data", "other.txt", "--eval-every", "2"};
  const auto train_as = [&](const std::string& name, Arguments more, bool evaluated) {
    more.insert(more.end(), {"--save", name + ".st", "--metrics", name + ".jsonl"});
    if (evaluated) {
      more.insert(more.end(), evaluate.begin(), evaluate.end());
    }
    const ProcessResult result = run_well(common, more);
    EXPECT_EQ(contains(result.out, "evaluated on 5 sequences, data: text:other.txt"), evaluated)
        << result.out;
    EXPECT_EQ(contains(result.out, "eval loss "), evaluated) << result.out;
  };
  train_as("one", {"--ranks", "1"}, false);
  train_as("two", {"--ranks", "2"}, false);
  train_as("one_eval", {"--ranks", "1"}, true);
  train_as("two_eval", {"--ranks", "2"}, true);
  train_as("plain_eval", {"--unsharded"}, true);
  EXPECT_EQ(read("one.st"), read("one_eval.st"));
  EXPECT_EQ(read("one.st"), read("plain_eval.st"));
  EXPECT_EQ(read("two.st"), read("two_eval.st"));

  const std::vector<Json> one = lines("one_eval.jsonl");
  const std::vector<Json> two = lines("two_eval.jsonl");
  const std::vector<Json> plain = lines("plain_eval.jsonl");
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
  const std::vector<Json> quiet = lines("two.jsonl");
  EXPECT_EQ(two[4].at("gathered_bytes"), quiet[4].at("gathered_bytes"));
}

TEST_F(Train, GeneratedDataIsEvaluatedOnOtherSequencesThanItIsTrainedOn) {
  train({"--preset", "micro", "--steps", "1", "--batch", "2", "--lr", "0", "--eval-data", "demo",
         "--eval-batches", "1", "--metrics", "run.jsonl"});
  const Json step = lines("run.jsonl").at(0);
  EXPECT_NE(step.at("eval_loss"), step.at("loss"));
}

TEST_F(Train, EpochsAreStepsOverAllFiles) {
  write("a.txt", std::string(16 * 5 + 1, 'a'));
  std::filesystem::create_directory(directory_.path() / "more");
  write("more/b.txt", std::string(16 * 4 + 9, 'b'));
  const ProcessResult result =
      train({"--preset", "micro", "--vocab", "128", "--batch", "2", "--epochs", "3", "--data",
             "a.txt", "--data", "text:more", "--metrics", "run.jsonl"});
  EXPECT_HAS(result.out,
             "12 steps of 2 sequences of 16 tokens, data: text:a.txt, "
             "text:more/b.txt\n3 epochs of 4 steps over 9 sequences, "
             "without 1 that fills no batch\n");
  EXPECT_EQ(lines("run.jsonl").size(), 12U);
}

TEST_F(Train, ADivergedRunSaysSoAndHasAnExitCodeOfItsOwn) {
  const Arguments common{"train",  "--preset", "micro",     "--lr",     "1e30",
                         "--save", "last.st",  "--metrics", "run.jsonl"};
  for (const char* ranks : {"1", "2"}) {
    const ProcessResult result = run(common, {"--ranks", ranks, "--steps", "6"});
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_HAS(result.err, "training diverged: ");
    EXPECT_HAS(result.err, "try a lower learning rate");
    EXPECT_HAS(result.err, "; --save was written");
    EXPECT_EQ(lines("run.jsonl").size(), 6U);
    EXPECT_TRUE(std::filesystem::remove(directory_.path() / "last.st"));
  }
}

TEST_F(Train, ADivergedRunStopsIfAsked) {
  const ProcessResult result =
      run({"train", "--preset", "micro", "--lr", "1e30", "--ranks", "2", "--steps", "100",
           "--stop-on-divergence", "--metrics", "run.jsonl"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  const std::vector<Json> steps = lines("run.jsonl");
  EXPECT_GE(steps.size(), 10U);
  EXPECT_LT(steps.size(), 20U);
  EXPECT_EQ(steps.back().at("skipped"), true);
}

TEST_F(Train, ParametersThatAreNoNumbersAreNotSaved) {
  write("last.st", "what was there before");
  const ProcessResult result = run({"train", "--preset", "micro", "--lr", "1e30", "--steps", "4",
                                    "--set", "grad.skip_nonfinite=false", "--save", "last.st"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_HAS(result.err, "; --save was not written");
  EXPECT_EQ(read("last.st"), "what was there before");
}

TEST_F(Train, AModelHasTheShapeOfFlagsOrOfAFile) {
  write("config.json", R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 3,
                           "n_positions": 8, "vocab_size": 40, "activation_function": "relu"})");
  const Arguments file{"--model", "config.json", "--heads", "4"};
  const Arguments flags{"--width", "48", "--heads", "4",  "--layers",  "1",
                        "--seq",   "8",  "--vocab", "40", "--tie-head"};
  const Arguments common{"train", "--steps", "2", "--batch", "2", "--save"};
  const ProcessResult by_file = run_well(common, joined({"file.st"}, file));
  EXPECT_HAS(by_file.out, "config.json, heads 4: ");
  EXPECT_HAS(by_file.err,
             "tessera: warning: --model \"config.json\": activation relu becomes gelu");
  const ProcessResult by_flags = run_well(common, joined({"flags.st"}, flags));
  EXPECT_HAS(by_flags.out, "tiny, width 48, heads 4: ");
  EXPECT_EQ(read("file.st"), read("flags.st"));

  const ProcessResult inspected = run_well({"inspect"}, file);
  EXPECT_HAS(inspected.out, "config.json, heads 4");
}

// Whether there is a warning depends on this machine's CPU.
TEST_F(Train, LowPrecisionOnACpuWithoutUnitsIsWarnedAboutOnce) {
  const std::string expected =
      cli::slow_precision_text(cli::read_low_precision_units(), DType::kBFloat16);
  const ProcessResult result = train({"--preset", "micro", "--steps", "1", "--batch", "2",
                                      "--precision", "bf16", "--seq", "4", "--ranks", "2"});
  const std::string line = "tessera: warning: " + expected + "\n";
  EXPECT_EQ(contains(result.err, "tessera: warning: "), !expected.empty()) << result.err;
  if (!expected.empty()) {
    EXPECT_HAS(result.err, line);
    EXPECT_EQ(result.err.find(line), result.err.rfind(line)) << result.err;
  }
  EXPECT_LACKS(result.err, "frame #");
}

// --- DeepSpeed's files ---

TEST_F(Train, AFileOfAutosTrainsAShortRunWithoutAWarning) {
  const ProcessResult result = train_steps({"--config", shape("zero3_all_auto"), "--lr", "0.5"});
  EXPECT_LE(result.err_lines().size(), 10U) << result.err;
  EXPECT_LACKS(result.err, "warn");
  EXPECT_EQ(learning_rates(), (std::vector<double>{0.5, 0.5, 0.5})) << "no warm-up was asked for";
}

TEST_F(Train, ErrorFeedbackThatIsNotBuiltIsAWarningThatNamesTheKeyAndTheWayOut) {
  write("loco.json", R"({"zero_optimization": {"stage": 3, "zero_quantized_gradients": true,
                         "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}})");
  const ProcessResult result = train_steps({"--config", "loco.json", "--ranks", "2"}, "1");
  const std::vector<std::string> warnings = lines_with(result.out + result.err, "LoCo");
  ASSERT_EQ(warnings.size(), 1U) << result.out << result.err;
  EXPECT_HAS(warnings[0], "quant.error_feedback (loco.json: zero_optimization.zeropp_loco_param");
  EXPECT_HAS(warnings[0], "without effect");
  EXPECT_HAS(warnings[0], "--quantize-gradients=8");
}

TEST_F(Train, EverySubjectAtOnceTakesTenLinesAtMost) {
  const ProcessResult result = train_steps(
      {"--config", shape("every_subject"), "--optimizer", "host", "--set", "nvme.paths="});
  const std::vector<std::string> lines = result.err_lines();
  // What the CPU lacks, said by us or by torch, is not about the file.
  const auto num_lines = std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return !contains(line, "this CPU has no") && !contains(line, "warning of torch");
  });
  EXPECT_LE(num_lines, 10) << result.err;
  EXPECT_HAS(result.err, "--tensorboard DIR` for tensorboard");
  EXPECT_HAS(result.err,
             "schedule.warmup_steps = 1000 (a default, DeepSpeed's) is more than the 3 "
             "steps of the run");
}

TEST_F(Train, FlagsWinOverTheFileAndTheLogShowsWhatHolds) {
  const ProcessResult result = train_steps({"--config", shape("monitors"), "--batch", "6"});
  EXPECT_HAS(result.out, "of 6 sequences");
  EXPECT_HAS(result.err,
             "training: batch.total = 6 (--batch, not train_batch_size = 16), "
             "batch.micro_per_rank = 3 (derived, not train_micro_batch_size_per_gpu = "
             "4), batch.accumulate = 2");
}

TEST_F(Train, SizesOfOneElementTrainOnSeveralRanks) {
  const ProcessResult result = train_steps({"--config", shape("tiny_sizes"), "--ranks", "2"});
  EXPECT_HAS(result.err, "grad.bucket_bytes = 1MiB (the least, for reduce_bucket_size");
}

// Our own option is taken at its word, but nobody should have to guess why a step takes so long.
TEST_F(Train, BucketsThatMakeVeryManyCallsAreMentioned) {
  const ProcessResult result = train_steps({"--ranks", "2", "--set", "grad.bucket_bytes=160"}, "1");
  EXPECT_HAS(result.err, "grad.bucket_bytes = 160B (command line) cuts the gradients into");
}

TEST_F(Train, ARunWithoutShardsSaysTheSameOfItsSchedule) {
  const ProcessResult result = train_steps(
      {"--unsharded", "--config", shape("warmup_decay"), "--set", "schedule.total_steps=9"});
  EXPECT_HAS(result.err, "end within the warm-up, schedule.warmup_steps = 500");
}

TEST_F(Train, FlagsOfTheScheduleSetItsOptions) {
  train_steps({"--lr", "8", "--lr-start", "2", "--lr-min", "4", "--warmup", "2", "--schedule",
               "linear", "--schedule-steps", "4"},
              "5");
  EXPECT_EQ(learning_rates(), (std::vector<double>{2, 5, 8, 6, 4}));
}

// --- what one sees of a run ---

TEST_F(Train, AFullDiskUnderTheMetricsCostsNeitherTheRunNorTheModel) {
  if (::access("/dev/full", W_OK) != 0) {
    GTEST_SKIP() << "there is no /dev/full";
  }
  std::filesystem::create_symlink("/dev/full", path("run.jsonl"));
  const ProcessResult result =
      train({"--ranks", "2", "--preset", "micro", "--steps", "4", "--metrics", "run.jsonl",
             "--tensorboard", "board", "--save", "model.safetensors"});
  const std::vector<std::string> warnings = lines_with(result.err, "cannot be written");
  ASSERT_EQ(warnings.size(), 1U) << result.err;
  EXPECT_HAS(warnings[0], "--metrics \"run.jsonl\"");
  EXPECT_HAS(result.out, "\n4 steps in ");
  EXPECT_TRUE(std::filesystem::exists(path("model.safetensors")));
  std::size_t num_boards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path("board"))) {
    EXPECT_GT(std::filesystem::file_size(entry.path()), 4U * 100U);
    ++num_boards;
  }
  EXPECT_EQ(num_boards, 1U);  // rank 0's
}

TEST_F(Train, AGivenPeakAndALineEverySoManySteps) {
  const ProcessResult result =
      train({"--preset", "micro", "--steps", "5", "--batch", "2", "--log-every", "2",
             "--peak-tflops", "1e-6", "--metrics", "run.jsonl"});
  const std::vector<std::string> shown = lines_with(result.out, " left");
  ASSERT_EQ(shown.size(), 3U) << result.out;
  EXPECT_EQ(shown[0].rfind("step 2/5", 0), 0U);
  EXPECT_EQ(shown[1].rfind("step 4/5", 0), 0U);
  EXPECT_EQ(shown[2].rfind("step 5/5", 0), 0U);
  // 6 * (2 blocks of 12 * 32^2 and a head of 64 * 32) + 12 * 2 * 32 * 16 operations per token.
  constexpr double kFlopsPerToken = 6 * (2 * 12 * 1024 + 64 * 32) + 12 * 2 * 32 * 16;
  EXPECT_EQ(lines("run.jsonl").size(), 5U);
  for (const Json& step : lines("run.jsonl")) {
    const double expected = kFlopsPerToken * step.at("tokens_per_s").get<double>() / 1e6;
    EXPECT_NEAR(step.at("mfu").get<double>(), expected, 1e-9 * expected);
  }
}

TEST_F(Train, AWarningTheScreenAndTheMetricsCountStepsFromOne) {
  const ProcessResult result =
      train({"--preset", "micro", "--steps", "1", "--batch", "1", "--precision", "fp16", "--set",
             "loss_scale.initial=1e30", "--metrics", "run.jsonl"});
  EXPECT_HAS(result.err, "[step 1] a gradient is infinite");
  EXPECT_HAS(result.out, "\nstep 1/1 ");
  EXPECT_EQ(lines("run.jsonl").at(0).at("step"), 1);
}

TEST_F(Train, EveryFieldOfTheMetricsIsInTheDocument) {
  const auto fields = Json::parse(cli::metrics_json({}));
  const std::string text =
      read_whole(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/metrics.md");
  for (const auto& [name, value] : fields.items()) {
    EXPECT_HAS(text, "\n| `" + name + "` | ");
  }
}

TEST_F(Train, PlotMakesAPageOfSeveralRuns) {
  write("one.jsonl", "{\"step\": 1, \"loss\": 2.5}\n");
  write("two.jsonl", "{\"step\": 1, \"loss\": 2.25}\n{\"ste");
  const ProcessResult result = run_well({"plot", "one.jsonl", "two.jsonl"});
  EXPECT_EQ(result.out,
            "one.jsonl: 1 step\ntwo.jsonl: 1 step, last line not complete\n"
            "wrote one.html; open it in a browser\n");
  const std::string page = read("one.html");
  EXPECT_EQ(page.rfind("<!DOCTYPE html>", 0), 0U);
  EXPECT_HAS(page, "\"mean\":[2.25]");
  EXPECT_HAS(page, "</html>");
}

}  // namespace
}  // namespace tessera::testing
