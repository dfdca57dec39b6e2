// `tessera generate`: the prompt comes back with a continuation, as text where the run's data were
// text; flags that mean nothing are refused.
#include <algorithm>

#include <gtest/gtest.h>

#include "models/gpt.h"
#include "tests/cli/in_process.h"
#include "tests/models/checkpoint_files.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

class GenerateCommand : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (directory_.path() / name).string(); }
  void save(const std::string& sources, std::int64_t vocabulary,
            DType dtype = DType::kFloat32) const {
    models::GptOptions options = models::gpt_preset("micro");
    options.vocabulary = vocabulary;
    const models::Gpt gpt(options, at::kCPU, 3);
    models::scatter(gpt, 0.25);  // logits that are not alike
    models::write_gpt_checkpoint(path("run"), gpt,
                                 {.num_ranks = 2, .dtype = dtype, .sources = sources});
  }
  InProcessResult run(const std::string& prompt, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"generate", "--checkpoint", path("run"), "--prompt",
                                          prompt};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_in_process(arguments);
  }
  std::string text(const std::string& prompt, const std::vector<std::string>& more = {}) const {
    const InProcessResult result = run(prompt, more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(result.out.starts_with(prompt)) << result.out;
    return result.out;
  }
  void expect_refused(const std::string& prompt, const std::vector<std::string>& more,
                      const std::string& part) const {
    const InProcessResult result = run(prompt, more);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_HAS(result.err, part);
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(GenerateCommand, ContinuesBytesAlikeWithAndWithoutACache) {
  save("text:book.txt", 256);
  const std::string greedy = text("Once", {"--temperature", "0", "--tokens", "40"});
  EXPECT_EQ(greedy.size(), std::string("Once").size() + 40 + 1);
  EXPECT_EQ(greedy.back(), '\n');
  EXPECT_EQ(text("Once", {"--temperature", "0", "--tokens", "40", "--no-cache"}), greedy);
  EXPECT_EQ(text("Once", {"--top-k", "1", "--tokens", "40"}), greedy);
}

TEST_F(GenerateCommand, ContinuesTheDemoCorpusInItsAlphabetBySeed) {
  save("demo", 64);
  const std::string first = text("the old baker ");
  EXPECT_EQ(first.size(), std::string("the old baker ").size() + 100 + 1);
  EXPECT_TRUE(std::all_of(first.begin(), first.end() - 1, [](char c) {
    return c == ' ' || c == '.' || (c >= 'a' && c <= 'z');
  })) << first;
  EXPECT_EQ(text("the old baker ", {"--seed", "0"}), first);
  EXPECT_NE(text("the old baker ", {"--seed", "1"}), first);
}

TEST_F(GenerateCommand, ContinuesTokensAsNumbersInTheRunsPrecisionIfAsked) {
  save("tokens:corpus.bin", 64, DType::kBFloat16);
  const std::string tokens = text("12 55 7", {"--tokens", "3", "--precision", "bf16"});
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), ' '), 5) << tokens;
  EXPECT_EQ(run("12,55", {"--tokens", "1", "--temperature", "0"}).out.substr(0, 6), "12 55 ");
}

TEST_F(GenerateCommand, SaysWhatOfALongPromptTheModelSees) {
  save("demo", 64);
  const InProcessResult result = run("the old baker sells", {"--tokens", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err,
            "tessera: warning: the prompt has 19 tokens, and the model has positions for 16: it "
            "sees the last 8\n");
  EXPECT_EQ(run("the old baker se", {"--tokens", "1"}).err, "");
}

TEST_F(GenerateCommand, RefusesFlagsAndPromptsByName) {
  save("demo", 64);
  expect_refused("The", {}, "\"T\" at place 0 is not of the demo corpus");
  expect_refused("", {}, "nothing to continue");
  expect_refused("a", {"--temperature", "-1"}, "--temperature \"-1\" is not a number from 0 on");
  expect_refused("a", {"--temperature", "warm"}, "--temperature \"warm\"");
  expect_refused("a", {"--top-k", "-2"}, "--top-k \"-2\"");
  expect_refused("a", {"--tokens", "0"}, "--tokens \"0\"");
  expect_refused("a", {"--seed", "x"}, "--seed \"x\"");
  expect_refused("a", {"--device", "tpu"}, "--device \"tpu\" is neither cpu nor cuda");
  expect_refused("a", {"--precision", "fp8"}, "--precision \"fp8\" is none of fp32, bf16, fp16");
  std::filesystem::remove_all(path("run"));
  expect_refused("a", {}, "run");
  save("random", 64);
  expect_refused("12 64", {}, "prompt: token 64 is not in the vocabulary of 64");
  expect_refused("twelve", {}, "\"twelve\" is not a token's number");
}

}  // namespace
}  // namespace tessera::cli
