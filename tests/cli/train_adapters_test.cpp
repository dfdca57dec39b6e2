// `tessera train --adapters`, as a user runs it: what is frozen and what is trained, in parts as in
// one, over a base of files, and what becomes of it.
#include <regex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

class Adapters : public ProgramTest {
 protected:
  static Arguments micro(const Arguments& flags) {
    return joined(
        {"train", "--preset", "micro", "--threads", "1", "--adapters", "4", "--lr", "0.01"}, flags);
  }
  ProcessResult train(const Arguments& flags) const { return run_well(micro(flags)); }
  // A line that begins with the tier, then the role, then the bytes.
  static bool contains_row(const std::string& text, const std::string& role,
                           const std::string& bytes) {
    return std::regex_search(text, std::regex("\\n[a-z]+ +" + role + " +" + bytes + " "));
  }
  std::vector<std::string> losses(const std::string& metrics) const {
    std::vector<std::string> found;
    for (const Json& step : lines(metrics)) {
      found.push_back(step.at("loss").dump());
    }
    return found;
  }
};

// Of micro: 30,080 elements; adapters of rank 4 on 2 blocks of width 32.
constexpr std::int64_t kBase = 30080;
constexpr std::int64_t kTrained = 2 * 16 * 4 * 32;

TEST_F(Adapters, LearnOverAFrozenBaseAndSaySo) {
  const ProcessResult result = train({"--ranks", "2", "--steps", "40", "--metrics", "run.jsonl"});
  EXPECT_HAS(result.out, "(4.10k trained, 30.1k frozen)");
  const std::vector<Json> steps = lines("run.jsonl");
  EXPECT_LT(steps.back().at("loss").get<double>(), steps.front().at("loss").get<double>() - 0.5);
  EXPECT_EQ(steps.front().at("trainable_params"), kTrained);
  EXPECT_EQ(steps.front().at("frozen_params"), kBase);
  // Two moments, of adapters alone: of two ranks, half of them each.
  EXPECT_TRUE(contains_row(result.out, "optimizer", "16.0 KiB")) << result.out;
}

TEST_F(Adapters, TrainUnshardedTheSameBits) {
  train({"--ranks", "1", "--steps", "5", "--metrics", "one.jsonl", "--save", "one.st"});
  train({"--unsharded", "--steps", "5", "--metrics", "plain.jsonl", "--save", "plain.st"});
  EXPECT_EQ(losses("one.jsonl"), losses("plain.jsonl"));
  EXPECT_EQ(read("one.st"), read("plain.st"));
  EXPECT_HAS(train({"--ranks", "1", "--verify", "3"}).out, "equal unsharded training, bit for bit");
  EXPECT_HAS(train({"--ranks", "2", "--verify", "3", "--recompute", "--tie-head"}).out,
             "verified: 3 steps of 2 ranks");
}

TEST_F(Adapters, GoOnWhereTheyWereAndAreExportedMerged) {
  train({"--steps", "6", "--metrics", "whole.jsonl", "--checkpoint", "whole"});
  train({"--steps", "6", "--stop-after", "1ms", "--checkpoint", "parts"});
  train({"--steps", "6", "--metrics", "parts.jsonl", "--checkpoint", "parts", "--resume"});
  EXPECT_EQ(losses("parts.jsonl").back(), losses("whole.jsonl").back());

  const auto resumed = [&](const Arguments& flags) {
    return joined(
        {"train", "--preset", "micro", "--steps", "8", "--checkpoint", "parts", "--resume"}, flags);
  };
  expect_refusal(resumed({}), "--adapters was 4 and is not said");
  expect_refusal(resumed({"--adapters", "2"}), "--adapters was 4 and is 2");
  expect_refusal(resumed({"--adapters", "4", "--adapter-alpha", "4"}),
                 "--adapter-alpha was 8 and is 4");

  const ProcessResult exported =
      run_well({"export", "--checkpoint", "parts", "--to", "merged", "--names", "tessera"});
  EXPECT_HAS(exported.out, "29 tensors in fp32");
  EXPECT_HAS(exported.out, "adapters are merged into 8 of them");
  // Merged weights are a base: what they computed is learned. Without adapters the loss would be as
  // at the start.
  run_well({"train", "--preset", "micro", "--threads", "1", "--steps", "1", "--init", "merged",
            "--metrics", "merged.jsonl"});
  EXPECT_LT(lines("merged.jsonl").front().at("loss").get<double>(),
            lines("whole.jsonl").front().at("loss").get<double>() - 0.2);
  run_well({"export", "--checkpoint", "parts", "--to", "peft", "--adapters", "alone"});
  EXPECT_EQ(files().count("peft/adapter_model.safetensors"), 1U);
  EXPECT_EQ(run_well({"generate", "--checkpoint", "parts", "--prompt", "a", "--tokens", "8",
                      "--temperature", "0"})
                .out.size(),
            10U);
}

TEST_F(Adapters, TrainOverABaseThatIsHeldAsBlocks) {
  for (const std::string bits : {"8", "4"}) {
    const Arguments base{"--freeze-base", "int" + bits};
    const auto with = [&](const Arguments& flags) { return train(joined(base, flags)); };
    const ProcessResult first = with(
        {"--ranks", "2", "--steps", "20", "--metrics", "run.jsonl", "--checkpoint", "run" + bits});
    EXPECT_HAS(first.out, "(4.10k trained, 30.1k frozen as int" + bits + " blocks)");
    EXPECT_LT(lines("run.jsonl").back().at("loss").get<double>(),
              lines("run.jsonl").front().at("loss").get<double>() - 0.3);
    // The reference trains over the values that blocks hold.
    EXPECT_HAS(with({"--ranks", "1", "--verify", "3"}).out,
               "equal unsharded training, bit for bit");
    EXPECT_HAS(with({"--ranks", "2", "--verify", "3", "--recompute", "--tie-head"}).out,
               "verified: 3 steps of 2 ranks");
    // Over a base that was rounded, not over the one that was drawn.
    with({"--steps", "1", "--metrics", "rounded.jsonl"});
    train({"--steps", "1", "--metrics", "drawn.jsonl"});
    EXPECT_NE(losses("rounded.jsonl"), losses("drawn.jsonl"));
    with({"--ranks", "1", "--steps", "22", "--checkpoint", "run" + bits, "--resume", "--metrics",
          "run.jsonl"});
    EXPECT_EQ(lines("run.jsonl").size(), 22U);
    EXPECT_HAS(run_well({"export", "--checkpoint", "run" + bits, "--to", "out" + bits}).out,
               "29 tensors in fp32");
    EXPECT_EQ(run_well({"generate", "--checkpoint", "run" + bits, "--prompt", "a", "--tokens", "8"})
                  .out.size(),
              10U);
  }
}

TEST_F(Adapters, StartOverABaseOfFiles) {
  run_well({"train", "--preset", "micro", "--threads", "1", "--steps", "1", "--save", "base.st",
            "--metrics", "base.jsonl"});
  run_well({"train", "--preset", "micro", "--threads", "1", "--steps", "1", "--init", "base.st",
            "--metrics", "again.jsonl"});
  train({"--steps", "1", "--init", "base.st", "--metrics", "adapted.jsonl"});
  // Adapters that nobody has trained change no bit.
  EXPECT_EQ(losses("adapted.jsonl"), losses("again.jsonl"));
}

TEST_F(Adapters, AreToldApartByInspect) {
  const Arguments common{"inspect", "--preset", "micro", "--adapters", "4"};
  const ProcessResult screen = run_well(common, {"--host-budget", "10MiB"});
  EXPECT_HAS(screen.out, "trained: 4,096 elements; frozen: 30,080, without gradients");
  EXPECT_HAS(screen.out, "attention.qkv.adapter_a");
  const Json totals = Json::parse(run_well(common, {"--json"}).out).at("totals");
  EXPECT_EQ(totals.at("trainable_numel"), kTrained);
  EXPECT_EQ(totals.at("frozen_numel"), kBase);
}

TEST_F(Adapters, FlagsThatMakeNoSenseAreRefused) {
  const auto refuse = [&](const Arguments& flags, const std::string& part) {
    expect_refusal(joined({"train", "--preset", "micro"}, flags), part);
  };
  refuse({"--adapters", "0"}, "--adapters");
  refuse({"--adapters", "64"}, "--adapters 64 is not from 0 (none) to 32");
  refuse({"--adapter-alpha", "4"}, "--adapter-alpha scales adapters, and there are none");
  refuse({"--adapters", "4", "--adapter-alpha", "-1"}, "--adapter-alpha");
  refuse({"--freeze-base", "int4"}, "nothing would be trained; give --adapters R");
  refuse({"--adapters", "4", "--freeze-base", "int2"},
         "--freeze-base \"int2\" is none of none, full, int8, int4");
  refuse({"--adapters", "4", "--freeze", "2"}, "--freeze 2 with a frozen base");
}

}  // namespace
}  // namespace tessera::testing
