// A model continues a sequence: the cache of keys and values changes nothing but rounding, the
// window moves when positions run out, and prompts come and go as text.
#include "models/gpt_generation.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "models/gpt.h"
#include "models/token_text.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tests/models/models_support.h"
#include "tests/models/weight_files.h"
#include "tests/support/contains.h"

namespace tessera::models {
namespace {

using TokenList = std::vector<std::int64_t>;

constexpr std::uint64_t kGenerationSeed = 5;

at::Tensor random_ids(const GptOptions& options, std::int64_t rows, std::int64_t length) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  return at::randint(0, options.vocabulary, {rows, length}, generator,
                     at::TensorOptions().dtype(at::kLong));
}

// Of logits that two orders of summation give: a value passes through some 40 roundings in a row,
// each of a sum of at most 4 * width terms, whose errors add up as in a random walk; on both sides.
void expect_same_logits(const GptOptions& options, const at::Tensor& found,
                        const at::Tensor& expected) {
  const double bound = 2 * 40 * std::sqrt(4.0 * static_cast<double>(options.width)) * 0x1p-24;
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_LE((found - expected).norm().item<double>(), bound * expected.norm().item<double>());
}

TokenList continued(Gpt& gpt, const TokenList& prompt, const GenerationOptions& options) {
  TokenList tokens;
  generate(gpt, prompt, options, [&](std::int64_t token) { tokens.push_back(token); });
  return tokens;
}

TEST(Generation, NextLogitsAreThoseOfTheLoss) {
  const GptOptions options = gpt_preset("micro");
  Gpt gpt(options, at::kCPU, kGenerationSeed);
  scatter(gpt, 0.25);
  const at::Tensor ids = random_ids(options, 3, 7);
  double sum = 0;
  for (std::int64_t length = 1; length < ids.size(1); ++length) {
    const at::Tensor logits = gpt.next_logits(ids.narrow(1, 0, length));
    EXPECT_FALSE(logits.requires_grad());
    sum += at::cross_entropy_loss(logits, ids.select(1, length)).item<double>();
  }
  const std::int64_t num_targets = ids.size(1) - 1;
  const double loss =
      gpt.loss(ids.narrow(1, 0, num_targets), ids.narrow(1, 1, num_targets)).item<double>();
  EXPECT_NEAR(sum / static_cast<double>(num_targets), loss, 1e-5 * loss);
}

TEST(Generation, CachedLogitsAreThoseOfTheWholeSequence) {
  for (const bool tie_head : {false, true}) {
    GptOptions options = gpt_preset("micro");
    options.tie_head = tie_head;
    Gpt gpt(options, at::kCPU, kGenerationSeed);
    scatter(gpt, 0.25);
    const at::Tensor ids = random_ids(options, 2, options.sequence);
    for (const std::vector<std::int64_t>& pieces :
         {std::vector<std::int64_t>(16, 1), {1, 15}, {16}, {5, 1, 7, 3}}) {
      KeyValueCache cache;
      for (const std::int64_t piece : pieces) {
        const at::Tensor fresh = ids.narrow(1, cache.num_tokens, piece);
        const at::Tensor found = gpt.next_logits(fresh, &cache);
        expect_same_logits(options, found, gpt.next_logits(ids.narrow(1, 0, cache.num_tokens)));
      }
      EXPECT_EQ(cache.num_tokens, options.sequence);
    }
  }
}

TEST(Generation, GivesTheSameTokensWithAndWithoutACache) {
  GptOptions options = gpt_preset("micro");
  for (const std::int64_t sequence : {16, 5, 1}) {
    options.sequence = sequence;
    Gpt gpt(options, at::kCPU, kGenerationSeed);
    scatter(gpt, 0.25);
    GenerationOptions generation;
    generation.num_tokens = 40;  // beyond the positions, several times
    for (const double temperature : {0.0, 1.0}) {
      generation.sampling.temperature = temperature;
      generation.use_cache = true;
      const TokenList cached = continued(gpt, {1, 2, 3}, generation);
      generation.use_cache = false;
      EXPECT_EQ(continued(gpt, {1, 2, 3}, generation), cached) << sequence << ", " << temperature;
      EXPECT_EQ(cached.size(), 40U);
    }
  }
}

TEST(Generation, SeesTheLastHalfWhenPositionsHaveRunOut) {
  GptOptions options = gpt_preset("micro");
  options.sequence = 8;
  Gpt gpt(options, at::kCPU, kGenerationSeed);
  scatter(gpt, 0.25);
  GenerationOptions generation;
  generation.sampling.temperature = 0;
  generation.num_tokens = 1;
  const TokenList prompt = {9, 1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_EQ(continued(gpt, prompt, generation),
            continued(gpt, {prompt.end() - tokens_kept(8), prompt.end()}, generation));
  EXPECT_EQ(tokens_kept(8), 4);
  EXPECT_EQ(tokens_kept(1), 1);
}

TEST(Generation, IsRepeatedByItsSeedAndDrawsOnlyWhatHasAText) {
  Gpt gpt(gpt_preset("micro"), at::kCPU, kGenerationSeed);
  scatter(gpt, 0.25);
  GenerationOptions generation;
  generation.num_tokens = 60;
  generation.sampling.seed = 1;
  const TokenList first = continued(gpt, {0}, generation);
  EXPECT_EQ(continued(gpt, {0}, generation), first);
  EXPECT_TRUE(std::any_of(first.begin(), first.end(), [](std::int64_t t) { return t >= 28; }));
  generation.sampling.seed = 2;
  EXPECT_NE(continued(gpt, {0}, generation), first);
  generation.num_symbols = 28;
  for (const std::int64_t token : continued(gpt, {0}, generation)) {
    EXPECT_LT(token, 28);
  }
}

TEST(Generation, RefusesWhatTheModelCannotContinue) {
  const GptOptions options = gpt_preset("micro");
  Gpt gpt(options, at::kCPU, kGenerationSeed);
  EXPECT_HAS(message_of([&] { continued(gpt, {}, {}); }), "the prompt has no tokens");
  EXPECT_EQ(message_of([&] { continued(gpt, {64}, {}); }),
            "prompt: token 64 is not in the vocabulary of 64");
  EXPECT_HAS(message_of([&] { continued(gpt, {-1}, {}); }), "token -1");
  EXPECT_EQ(message_of([&] { gpt.next_logits(random_ids(options, 1, 17)); }),
            "17 tokens: the model has positions for 16; begin anew with the last of them");
  EXPECT_HAS(message_of([&] { gpt.next_logits(at::ones({1, 0}, at::kLong)); }), "[batch, length]");
  EXPECT_HAS(message_of([&] { gpt.next_logits(at::ones({1, 2})); }), "[batch, length]");

  Config config;
  config.set("seed", static_cast<std::int64_t>(kGenerationSeed));
  Runtime runtime(config);
  Engine engine(runtime);
  Gpt sharded(options, engine, kGenerationSeed);
  EXPECT_HAS(message_of([&] { sharded.next_logits(random_ids(options, 1, 3)); }),
             "next_logits() of a sharded GPT");
}

TEST(TokenText, ComesBackAsItWas) {
  const auto round_trip = [](TokenMeaning meaning, const std::string& prompt) {
    std::string text;
    bool is_first = true;
    for (const std::int64_t token : prompt_tokens(meaning, prompt)) {
      text += token_text(meaning, token, is_first);
      is_first = false;
    }
    return text;
  };
  const std::string bytes("\xff\x00 a\xc3\xa9\n", 7);
  EXPECT_EQ(round_trip(TokenMeaning::kByte, bytes), bytes);
  EXPECT_EQ(prompt_tokens(TokenMeaning::kByte, "\xff"), TokenList{255});
  EXPECT_EQ(round_trip(TokenMeaning::kDemoSymbol, "the old baker."), "the old baker.");
  EXPECT_EQ(prompt_tokens(TokenMeaning::kDemoSymbol, " a."), (TokenList{0, 1, 27}));
  EXPECT_EQ(round_trip(TokenMeaning::kNumber, " 12, 55\t7 "), "12 55 7");
  EXPECT_EQ(prompt_tokens(TokenMeaning::kNumber, "-3"), TokenList{-3});  // not in any vocabulary
  EXPECT_TRUE(prompt_tokens(TokenMeaning::kNumber, " ").empty());
}

TEST(TokenText, NamesWhatIsNoToken) {
  EXPECT_EQ(message_of([] { prompt_tokens(TokenMeaning::kNumber, "12 the 7"); }),
            "prompt: \"the\" is not a token's number; this model's tokens are numbers, such as 12 "
            "55 7");
  EXPECT_HAS(message_of([] { prompt_tokens(TokenMeaning::kNumber, "99999999999999999999"); }),
             "is not a token's number");
  EXPECT_HAS(message_of([] { prompt_tokens(TokenMeaning::kDemoSymbol, "old Baker"); }),
             "\"B\" at place 4 is not of the demo corpus");
}

TEST(TokenText, FollowsFromTheSourcesOfTheRun) {
  EXPECT_EQ(token_meaning_of("demo"), TokenMeaning::kDemoSymbol);
  EXPECT_EQ(token_meaning_of("random"), TokenMeaning::kNumber);
  EXPECT_EQ(token_meaning_of("text:a\nb.txt"), TokenMeaning::kByte);
  EXPECT_EQ(token_meaning_of("text:a\nb.bin"), TokenMeaning::kNumber);
  EXPECT_EQ(token_meaning_of("tokens32:a\n"), TokenMeaning::kNumber);
  EXPECT_EQ(token_meaning_of(""), TokenMeaning::kNumber);
  EXPECT_HAS(message_of([] { token_meaning_of("bytes:a"); }), "data: \"bytes:a\" is unknown");
  EXPECT_EQ(num_text_symbols(TokenMeaning::kByte), 256);
  EXPECT_EQ(num_text_symbols(TokenMeaning::kDemoSymbol), 28);
}

}  // namespace
}  // namespace tessera::models
