// `tessera train` that saves and goes on, as a user runs it: a run in parts is the run in one, on
// any number of ranks, whatever has ended its parts.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

class Checkpointed : public ProgramTest {
 protected:
  static Arguments micro(const Arguments& flags) {
    return joined({"train", "--preset", "micro", "--threads", "1"}, flags);
  }
  ProcessResult train(const Arguments& flags, const Arguments& more = {}) const {
    return run_well(micro(flags), more);
  }
  // On the command line of a shell.
  static std::string train_text(const std::string& flags) {
    return std::string(TESSERA_BINARY) + " train --preset micro --threads 1 " + flags;
  }
  std::unique_ptr<Process> start(const Arguments& flags) const {
    return std::make_unique<Process>(joined({TESSERA_BINARY}, micro(flags)), here());
  }

  // What training has computed, with all digits.
  std::vector<std::string> numbers(const std::string& metrics) const {
    std::vector<std::string> found;
    for (const Json& step : lines(metrics)) {
      std::string text;
      for (const char* name :
           {"step", "loss", "grad_norm", "lr", "skipped", "loss_scale", "tokens"}) {
        text += step.at(name).dump() + " ";
      }
      found.push_back(text);
    }
    return found;
  }

  // Names of the saves in a root, the oldest first.
  std::vector<std::string> saves(const std::string& root) const {
    std::vector<std::string> names;
    if (fs::is_directory(path(root))) {
      for (const auto& entry : fs::directory_iterator(path(root))) {
        const std::string name = entry.path().filename();
        if (name.starts_with("save-")) {
          names.push_back(name);
        }
      }
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::int64_t step_of(const std::string& save) {
    return std::stoll(save.substr(save.rfind('-') + 1));
  }
  ProcessResult checkpoint(const Arguments& arguments) const {
    return run_tessera_forked(joined({"checkpoint"}, arguments), here());
  }
  void expect_intact(const std::string& root) const {
    const ProcessResult verified = checkpoint({root, "--verify"});
    EXPECT_EQ(verified.exit_code, 0) << verified.err << verified.out;
  }
  // Everything that training goes on from is in both, to the bit.
  void expect_same_saves(const std::string& left, const std::string& right) const {
    const ProcessResult compared = checkpoint({left, "--diff", right});
    EXPECT_EQ(compared.exit_code, 0) << compared.err << compared.out;
  }

  // The first flags are those of a run that is trained in one part, and in two: three steps, and
  // the rest. Returns the last part.
  ProcessResult expect_parts_make_a_whole(const Arguments& flags, const Arguments& of_parts,
                                          const std::string& steps) const {
    train(flags, {"--steps", steps, "--metrics", "whole.jsonl", "--checkpoint", "whole"});
    const Arguments parts = joined(flags, joined(of_parts, {"--metrics", "parts.jsonl"}));
    train(parts, {"--steps", "3", "--checkpoint", "parts"});
    EXPECT_EQ(saves("parts").size(), 1U + (of_parts.empty() ? 0U : 1U));
    ProcessResult second = train(parts, {"--steps", steps, "--checkpoint", "parts", "--resume"});
    EXPECT_HAS(second.out, ": step 3 of " + steps + ", saved by ");
    EXPECT_EQ(numbers("parts.jsonl"), numbers("whole.jsonl"));
    expect_same_saves("parts", "whole");
    return second;
  }
};

TEST_F(Checkpointed, RunsInPartsAreTheRunInOneOnOneRankInFp16) {
  // The scale is halved twice and doubled once in the first part, and again later.
  expect_parts_make_a_whole(
      {"--precision", "fp16", "--batch", "2", "--seq", "4", "--set", "loss_scale.initial=1e9",
       "--set", "loss_scale.hysteresis=1", "--set", "loss_scale.window=2"},
      {}, "8");
  const std::vector<Json> steps = lines("parts.jsonl");
  EXPECT_EQ(steps.at(0).at("skipped"), true) << "no scale was in flight";
  EXPECT_NE(steps.at(2).at("loss_scale"), steps.at(7).at("loss_scale"));
}

TEST_F(Checkpointed, RunsInPartsAreTheRunInOneOnTwoRanksWithAccumulationAndASchedule) {
  expect_parts_make_a_whole(
      {"--ranks", "2", "--batch", "12", "--accumulate", "2", "--clip", "0.5", "--schedule",
       "linear", "--schedule-steps", "6", "--warmup", "2", "--tie-head"},
      {"--save-every", "2"}, "6");
  EXPECT_EQ(saves("parts"), (std::vector<std::string>{"save-00003-step-4", "save-00004-step-6"}));

  // The same data on three ranks: but for rounding, where the order of sums differs.
  const Arguments flags = micro({"--batch", "12", "--clip", "0.5", "--schedule", "linear",
                                 "--schedule-steps", "6", "--warmup", "2", "--tie-head", "--steps",
                                 "6", "--metrics", "other.jsonl", "--checkpoint", "parts"});
  fs::remove_all(path("parts/save-00004-step-6"));
  for (const char* ranks : {"3", "1"}) {
    fs::copy_file(path("whole.jsonl"), path("other.jsonl"), fs::copy_options::overwrite_existing);
    const ProcessResult other = run_well(flags, {"--resume", "--keep", "9", "--ranks", ranks});
    EXPECT_HAS(other.out, "save-00003-step-4: step 4 of 6, saved by 2 ranks");
    const std::vector<Json> steps = lines("other.jsonl");
    const std::vector<Json> whole = lines("whole.jsonl");
    ASSERT_EQ(steps.size(), 6U);
    EXPECT_EQ(numbers("other.jsonl")[3], numbers("whole.jsonl")[3]) << "kept, not trained again";
    for (const std::size_t step : {4U, 5U}) {
      const double loss = whole[step].at("loss");
      EXPECT_NEAR(steps[step].at("loss").get<double>(), loss, 2e-6 * loss);
      EXPECT_EQ(steps[step].at("lr"), whole[step].at("lr"));
    }
    fs::remove_all(path("parts/" + saves("parts").back()));
  }
}

TEST_F(Checkpointed, RunsInPartsAreTheRunInOneOnNvmeWithSavesBesideTraining) {
  const DiskDirectory disk;
  Arguments flags{"--ranks", "2", "--nvme", disk.path().string()};
  for (const char* option : {"place.parameters=nvme", "place.optimizer=nvme",
                             "nvme.block_bytes=64KiB", "nvme.queue_depth=4", "nvme.threads=2"}) {
    flags.insert(flags.end(), {"--set", option});
  }
  const ProcessResult last =
      expect_parts_make_a_whole(flags, {"--save-every", "1", "--save-async"}, "6");
  EXPECT_HAS(last.out, " beside training, ");
  // The last save is made when nothing trains any more.
  EXPECT_HAS(last.out, "\nsaves           3, ");
  EXPECT_HAS(last.out, "2 beside training, ");
  expect_intact("parts");
}

TEST_F(Checkpointed, NothingToResumeIsARunThatBeginsAndNothingToTrainOneThatEnds) {
  const Arguments flags{"--steps",  "2",         "--checkpoint", "runs/one",
                        "--resume", "--metrics", "run.jsonl"};
  const ProcessResult first = train(flags);
  EXPECT_HAS(first.out, "--resume: \"runs/one\" has no save yet; the run starts anew\n");
  EXPECT_HAS(first.out, "the last is of step 2: ");
  const std::string metrics = read("run.jsonl");
  const ProcessResult again = train(flags, {"--save", "model.safetensors"});
  EXPECT_HAS(again.out, "all 2 steps are done");
  EXPECT_LACKS(again.out, "\nstep ");
  EXPECT_EQ(read("run.jsonl"), metrics);
  EXPECT_EQ(saves("runs/one").size(), 1U) << "what is saved is not saved again";
  EXPECT_GT(fs::file_size(path("model.safetensors")), 1000U);
}

TEST_F(Checkpointed, KeepsAsManySavesAsAreAskedFor) {
  train({"--steps", "5", "--checkpoint", "run", "--save-every", "1", "--keep", "3"});
  EXPECT_EQ(saves("run"), (std::vector<std::string>{"save-00003-step-3", "save-00004-step-4",
                                                    "save-00005-step-5"}));
  expect_intact("run");
}

TEST_F(Checkpointed, AnotherRunIsRefusedWithBothValues) {
  write("a.txt", std::string(500, 'a') + std::string(500, 'b'));
  const Arguments flags{"--steps", "2", "--vocab", "128", "--data", "a.txt", "--checkpoint", "run"};
  train(flags, {"--ranks", "2"});
  const auto refuse = [&](const Arguments& changed, const std::string& part) {
    expect_refusal(micro(joined({"--checkpoint", "run"}, changed)), part);
  };
  const Arguments same{"--resume", "--steps", "4", "--data", "a.txt", "--vocab", "128"};
  refuse({"--vocab", "128", "--data", "a.txt"},
         "has saves of an earlier run, the newest of step 2");
  refuse(joined(same, {"--batch", "6", "--ranks", "3"}), "--batch was 8 and is 6");
  refuse(joined(same, {"--seed", "7"}), "--seed was 0 and is 7");
  refuse(joined(same, {"--width", "64", "--layers", "3"}),
         "--layers was 2 and is 3, --width was 32 and is 64; give what it was trained with");
  refuse(joined(same, {"--width", "64", "--partial"}), "--width was 32 and is 64");
  refuse({"--resume", "--vocab", "128"}, "--data was a.txt and is demo");
  refuse({"--resume", "--vocab", "128", "--data", "a.txt", "--epochs", "2"},
         "was drawn and is epochs");
  write("a.txt", std::string(500, 'a') + std::string(500, 'c'));
  refuse(same, "the data, a.txt, has changed: step 3 would have other tokens");
  // Where it lies is no matter.
  fs::create_directory(path("moved"));
  write("moved/b.txt", std::string(500, 'a') + std::string(500, 'b'));
  train({"--resume", "--steps", "4", "--data", "moved/b.txt", "--vocab", "128", "--checkpoint",
         "run", "--accumulate", "2", "--lr", "1e-4"});
}

TEST_F(Checkpointed, ASecondRunInTheSameDirectoryIsRefusedUntilTheFirstHasEnded) {
  for (const std::string ranks : {"1", "2"}) {
    SCOPED_TRACE(ranks + " ranks");
    const Arguments flags{"--checkpoint", "run", "--resume", "--ranks", ranks};
    {
      // It makes no save, so only the run itself can keep the directory.
      const auto first = start(joined(flags, {"--steps", "1000000"}));
      ASSERT_TRUE(first->wait_for_output("\nstep")) << first->wait().err;
      const ProcessResult second = run(micro(flags), {"--steps", "2"});
      EXPECT_EQ(second.exit_code, 2) << second.err;
      EXPECT_HAS(second.err, "run: process ");
      EXPECT_HAS(second.err, " uses this directory of checkpoints; wait until it has ended");
      EXPECT_TRUE(saves("run").empty());
      kill(first->pid(), SIGKILL);
      first->wait();
    }
    const ProcessResult next = train(flags, {"--steps", "2"});
    EXPECT_HAS(next.out, "has no save yet; the run starts anew");
    EXPECT_EQ(saves("run").size(), 1U);
    fs::remove_all(path("run"));
  }
}

TEST_F(Checkpointed, ASignalSavesAndTheRunGoesOn) {
  const auto process = start({"--ranks", "2", "--steps", "1000000", "--checkpoint", "run"});
  ASSERT_TRUE(process->wait_for_output("\nstep")) << process->wait().err;
  kill(process->pid(), SIGTERM);
  const ProcessResult result = process->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  ASSERT_EQ(saves("run").size(), 1U) << result.err;
  const std::int64_t step = step_of(saves("run")[0]);
  EXPECT_HAS(result.out, "stopped by SIGTERM after " + std::to_string(step) + " of 1000000 steps");
  const std::string steps = std::to_string(step + 2);
  train({"--ranks", "2", "--steps", steps, "--checkpoint", "run", "--resume"});
  train({"--ranks", "2", "--steps", steps, "--checkpoint", "whole"});
  expect_same_saves("run", "whole");
}

TEST_F(Checkpointed, ATimeThatIsOverSavesAndEndsWell) {
  const Arguments flags{"--ranks", "2", "--steps", "4", "--checkpoint", "run", "--resume"};
  const ProcessResult first = train(flags, {"--stop-after", "1us", "--save", "model.safetensors"});
  EXPECT_HAS(first.out, "stopped by --stop-after after 1 of 4 steps\n");
  EXPECT_TRUE(fs::exists(path("model.safetensors")));
  EXPECT_EQ(saves("run"), std::vector<std::string>{"save-00001-step-1"});
  const ProcessResult second = train(flags, {"--stop-after", "2h"});
  EXPECT_LACKS(second.out, "stopped by");
  EXPECT_EQ(saves("run").back(), "save-00002-step-4");
}

// The launcher is killed while every step is saved, mostly in the middle of a save; as often as
// TESSERA_TEST_KILLS says.
TEST_F(Checkpointed, AKilledRunLosesNothingBeforeItsNewestSave) {
  const char* const asked = std::getenv("TESSERA_TEST_KILLS");
  const int num_kills = asked == nullptr ? 2 : std::stoi(asked);
  std::mt19937 random(20261118);
  std::int64_t first_step = 0;
  for (int round = 0; round < num_kills; ++round) {
    SCOPED_TRACE("kill " + std::to_string(round));
    Arguments flags{"--ranks", "2",        "--steps",      "1000000", "--checkpoint",
                    "run",     "--resume", "--save-every", "1",       "--log-every",
                    "1"};
    const bool is_async = round % 2 == 1;
    if (is_async) {
      flags.insert(flags.end(), {"--save-async", "--save-memory", "0"});
    }
    const std::int64_t seen = first_step + 2 + static_cast<std::int64_t>(random() % 4);
    {
      const auto process = start(flags);
      ASSERT_TRUE(process->wait_for_output(" " + std::to_string(seen) + "/1000000 "))
          << process->wait().err;
      // Some looks at the directory later: no two of them take the same time.
      for (std::uint64_t looks = random() % 64; looks > 0; --looks) {
        static_cast<void>(saves("run"));
      }
      kill(process->pid(), SIGKILL);
      process->wait();
    }
    const std::vector<std::string> left = saves("run");
    ASSERT_FALSE(left.empty());
    expect_intact("run");
    const std::int64_t step = step_of(left.back());
    // A step is shown before it is saved, and the one before it is saved then.
    EXPECT_GE(step, is_async ? std::max<std::int64_t>(first_step, 1) : seen - 1);
    fs::remove_all(path("whole"));
    train({"--ranks", "2", "--steps", std::to_string(step), "--checkpoint", "whole"});
    expect_same_saves("run", "whole");
    first_step = step;
  }
}

TEST_F(Checkpointed, AFullDiskCostsNeitherTheRunNorTheSavesBefore) {
  train({"--steps", "2", "--checkpoint", "run"});
  for (const std::string beside : {"", " --save-async"}) {
    const ProcessResult full =
        shell("ulimit -f 8; " + train_text("--steps 6 --checkpoint run --resume --save-every 2") +
              beside);
    EXPECT_EQ(full.exit_code, 1) << full.out;
    EXPECT_HAS(full.err, "the save of step 4 failed, and training goes on: ");
    EXPECT_HAS(full.err, "it could not be saved anywhere else either");
    EXPECT_HAS(full.out, "2 failed, the last of step 6: ");
    EXPECT_HAS(full.out, "\n4 steps in ");
    EXPECT_EQ(saves("run"), std::vector<std::string>{"save-00001-step-2"});
    expect_intact("run");
  }
  train({"--steps", "6", "--checkpoint", "run", "--resume"});
}

TEST_F(Checkpointed, WhatCannotBeSavedWhereItShouldBeIsSavedSomewhereElse) {
  const auto process = start({"--ranks", "2", "--steps", "1000000", "--checkpoint", "run"});
  ASSERT_TRUE(process->wait_for_output("\nstep")) << process->wait().err;
  fs::remove_all(path("run"));
  write("run", "no directory");
  kill(process->pid(), SIGTERM);
  const ProcessResult result = process->wait();
  EXPECT_NE(result.exit_code, 0);
  std::smatch found;
  ASSERT_TRUE(
      std::regex_search(result.err, found, std::regex("the run is saved in \"([^\"]+)\" instead")))
      << result.err;
  EXPECT_HAS(found[1].str(), "/run.rescued-");
  expect_intact(found[1].str());
}

TEST_F(Checkpointed, ParametersThatAreNoNumbersTakeNoGoodSavesPlace) {
  const ProcessResult result =
      run(micro({"--lr", "1e30", "--steps", "4", "--set", "grad.skip_nonfinite=false",
                 "--checkpoint", "run", "--save-every", "1"}));
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_HAS(result.err, "; no checkpoint was made since then");
  const std::vector<std::string> left = saves("run");
  ASSERT_FALSE(left.empty());
  EXPECT_LT(step_of(left.back()), 4);
}

}  // namespace
}  // namespace tessera::testing
