#include "tessera/core/counter_random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using Words = std::array<std::uint32_t, 4>;

constexpr std::size_t kSample = 1 << 18;

TEST(Philox, GivesThePublishedAnswers) {  // Random123, kat_vectors, philox4x32 10
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  constexpr std::uint32_t kOnes = 0xffffffffU;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
  EXPECT_EQ(
      philox4x32({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}, {0xa4093822U, 0x299f31d0U}),
      (Words{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}));
}

std::uint32_t bits_of(const CounterRandom& random, std::uint64_t index) {
  return random.block(index / 4)[index % 4];
}

float uniform_of(const CounterRandom& random, std::uint64_t index) {
  float value = 0;
  random.fill_uniform(index, {&value, 1});
  return value;
}

float normal_of(const CounterRandom& random, std::uint64_t index) {
  float value = 0;
  random.fill_normal(index, {&value, 1});
  return value;
}

TEST(CounterRandom, AnElementIsOneLaneOfItsBlock) {
  const CounterRandom random(7, "blocks.0.up.weight");
  const std::uint64_t far = (std::uint64_t{1} << 40) + 3;
  for (const std::uint64_t index : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{63}, far}) {
    EXPECT_EQ(uniform_of(random, index), static_cast<float>(bits_of(random, index) >> 8) * 0x1p-24F)
        << index;
  }
}

// Frozen: saved experiments name a seed, and that seed must go on meaning the same model.
TEST(CounterRandom, ASeedAndANameMeanTheSameNumbersForEver) {
  const CounterRandom random(1, "tokens.weight");
  EXPECT_EQ(random.block(0), (Words{0x9713d3eeU, 0x46fc85f1U, 0xa12cad92U, 0x986962b3U}));
  EXPECT_EQ(normal_of(random, 0), 0x1.d2c86ap-3F);
  EXPECT_EQ(normal_of(random, 5), 0x1.e4c33ep+0F);
  EXPECT_EQ(uniform_of(random, 2), 0x1.42595ap-1F);
}

TEST(CounterRandom, AnyRangeIsMadeOfTheSameElements) {
  const CounterRandom random(3, "norm.weight");
  constexpr std::size_t kNumel = 1500;
  for (const std::uint64_t origin : {std::uint64_t{0}, std::uint64_t{0x3fffffff0}}) {
    std::vector<float> uniform_alone, normal_alone;
    for (std::size_t i = 0; i < kNumel + 9; ++i) {
      uniform_alone.push_back(uniform_of(random, origin + i));
      normal_alone.push_back(normal_of(random, origin + i));
    }
    for (std::size_t begin = 0; begin < 9; ++begin) {
      for (const std::size_t count : {0UL, 1UL, 2UL, 3UL, 4UL, 5UL, 255UL, 256UL, 257UL, kNumel}) {
        std::vector<float> uniform(count), normal(count);
        random.fill_uniform(origin + begin, uniform);
        random.fill_normal(origin + begin, normal);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(uniform[i], uniform_alone[begin + i]) << begin << " " << i;
          ASSERT_EQ(normal[i], normal_alone[begin + i]) << begin << " " << i;
        }
      }
    }
  }
}

TEST(CounterRandom, SeedsAndNamesHaveNumbersOfTheirOwn) {
  std::set<Words> blocks;
  std::size_t num_made = 0;
  for (const std::uint64_t seed : {0ULL, 1ULL, 1ULL << 32, (1ULL << 32) + 1}) {
    for (int layer = 0; layer < 64; ++layer) {
      for (const char* part : {"up", "down", "Up", ""}) {
        const std::string name = "blocks." + std::to_string(layer) + "." + part;
        for (std::uint64_t counter = 0; counter < 4; ++counter) {
          blocks.insert(CounterRandom(seed, name).block(counter));
          ++num_made;
        }
      }
    }
  }
  EXPECT_EQ(blocks.size(), num_made);
}

// The reference for normals: their probability, by the library's erfc, must be the one they were
// made for. The result is rounded to float, a relative error of 2^-24, which moves the probability
// p(x) by |x| * density(x) * 2^-24; erfc and the quantile together get 1e-14 of p.
TEST(CounterRandom, NormalIsTheQuantileOfItsBits) {
  const CounterRandom random(11, "normal");
  std::vector<float> values(200'000);
  random.fill_normal(0, values);
  for (std::uint64_t index = 0; index < values.size(); ++index) {
    const double p = (bits_of(random, index) + 0.5) * 0x1p-32;
    const double x = values[index];
    const double tail = std::min(p, 1 - p);
    const double made = 0.5 * std::erfc(std::fabs(x) / std::numbers::sqrt2);
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    ASSERT_NEAR(made, tail, std::fabs(x) * density * 0x1p-24 + 1e-14 * tail) << p;
    ASSERT_EQ(x < 0, p < 0.5) << p;
  }
}

// Bounds of six standard deviations of the estimate: 2e-9 that a good generator fails, and the seed
// is fixed besides.
TEST(CounterRandom, UniformFillsEqualBinsEqually) {
  std::vector<float> values(kSample);
  CounterRandom(5, "bins").fill_uniform(1, values);
  constexpr std::size_t kNumBins = 256;
  std::array<double, kNumBins> counts{};
  for (const float value : values) {
    ASSERT_GE(value, 0.0F);
    ASSERT_LT(value, 1.0F);
    counts[static_cast<std::size_t>(value * kNumBins)] += 1;
  }
  // Chi-square with 255 degrees of freedom: mean 255, variance 510.
  double chi_square = 0;
  constexpr double kExpected = static_cast<double>(kSample) / kNumBins;
  for (const double count : counts) {
    chi_square += (count - kExpected) * (count - kExpected) / kExpected;
  }
  EXPECT_NEAR(chi_square, kNumBins - 1, 6 * std::sqrt(2.0 * (kNumBins - 1)));
}

TEST(CounterRandom, BelowIsEvenAndNeverReachesItsLimit) {
  const CounterRandom random(9, "positions");
  constexpr std::uint64_t kLimit = 10;
  constexpr int kNumDraws = 100'000;
  std::array<int, kLimit> counts{};
  for (int i = 0; i < kNumDraws; ++i) {
    const std::uint64_t drawn = random.below(i, kLimit);
    ASSERT_LT(drawn, kLimit);
    ++counts[drawn];
  }
  for (const int count : counts) {  // binomial
    EXPECT_NEAR(count, kNumDraws * 0.1, 6 * std::sqrt(kNumDraws * 0.1 * 0.9));
  }
  EXPECT_EQ(random.below(0, 1), 0U);
  const std::uint64_t large = ~std::uint64_t{0};
  EXPECT_GT(std::max(random.below(0, large), random.below(1, large)), std::uint64_t{1} << 32);
  EXPECT_THROW(random.below(0, 0), InternalError);
}

}  // namespace
}  // namespace tessera
