// Which token comes next: the most likely, or as often as its probability says.
#include "models/sampling.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera::models {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int> drawn(const std::vector<float>& logits, const SamplingOptions& options,
                       int num_draws) {
  std::vector<int> counts(logits.size());
  for (int draw = 0; draw < num_draws; ++draw) {
    ++counts[static_cast<std::size_t>(
        sample_token(logits, options, static_cast<std::uint64_t>(draw)))];
  }
  return counts;
}

TEST(Sampling, WithoutTemperatureTheMostLikelyTokenIsTaken) {
  const std::vector<float> logits = {-3, 2, 5, -1, 5, 4};
  for (const std::int64_t top_k : {0, 1, 3}) {
    for (std::uint64_t draw = 0; draw < 20; ++draw) {
      EXPECT_EQ(sample_token(logits, {.temperature = 0, .top_k = top_k}, draw), 2);
    }
  }
}

TEST(Sampling, TokensComeAsOftenAsTheirProbabilitiesSay) {
  constexpr int kDraws = 20000;
  const std::vector<float> logits = {0, 1, -2, 3};
  for (const double temperature : {0.5, 1.0, 3.0}) {
    std::vector<double> weights;
    double sum = 0;
    for (const float logit : logits) {
      weights.push_back(std::exp(logit / temperature));
      sum += weights.back();
    }
    const std::vector<int> counts = drawn(logits, {.temperature = temperature, .seed = 3}, kDraws);
    for (std::size_t token = 0; token < logits.size(); ++token) {
      const double expected = weights[token] / sum;
      const double deviation = std::sqrt(expected * (1 - expected) * kDraws);
      EXPECT_NEAR(counts[token], expected * kDraws, 5 * deviation + 1) << temperature;
    }
  }
}

TEST(Sampling, OnlyTheMostLikelyAreDrawnWhereTheirNumberIsGiven) {
  const std::vector<float> logits = {1, 1, 1, -5, 1.5, 1};
  const auto come = [&](std::int64_t top_k) {
    std::vector<bool> seen;
    for (const int count : drawn(logits, {.temperature = 2, .top_k = top_k}, 500)) {
      seen.push_back(count > 0);
    }
    return seen;
  };
  EXPECT_EQ(come(1), (std::vector<bool>{false, false, false, false, true, false}));
  EXPECT_EQ(come(3), (std::vector<bool>{true, true, false, false, true, false}));  // ties: lower
  EXPECT_EQ(come(5), (std::vector<bool>{true, true, true, false, true, true}));
  EXPECT_EQ(come(100), come(0));
}

TEST(Sampling, TheNumberOfTheDrawAndTheSeedDecide) {
  const std::vector<float> logits(50, 0.0F);
  const auto tokens = [&](std::uint64_t seed) {
    std::vector<std::int64_t> result;
    for (std::uint64_t draw = 0; draw < 30; ++draw) {
      result.push_back(sample_token(logits, {.seed = seed}, draw));
    }
    return result;
  };
  EXPECT_EQ(tokens(1), tokens(1));
  EXPECT_NE(tokens(1), tokens(2));
}

TEST(Sampling, InfiniteLogitsAreTakenOrNeverAndOthersMustBeNumbers) {
  EXPECT_EQ(drawn({-kInfinity, 0, -kInfinity}, {}, 50), (std::vector<int>{0, 50, 0}));
  EXPECT_EQ(drawn({1, kInfinity, 1}, {}, 50), (std::vector<int>{0, 50, 0}));
  EXPECT_EQ(drawn({-kInfinity, -kInfinity}, {}, 5), (std::vector<int>{5, 0}));
  EXPECT_EQ(drawn({-3e38F, 3e38F}, {.temperature = 1e-300}, 50), (std::vector<int>{0, 50}));
  try {
    sample_token(std::vector<float>{1, NAN}, {}, 0);
    FAIL() << "expected CorruptError";
  } catch (const CorruptError& error) {
    EXPECT_HAS(error.what(), "logits are not numbers");
  }
}

}  // namespace
}  // namespace tessera::models
