// The engine against plain LibTorch, over models and options that nobody would write by hand. More
// seeds: engine_seeds, and `make fuzz`.
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "tests/property/random_case.h"

namespace tessera::testing {
namespace {

constexpr std::uint64_t kSeedsPerPart = 75;

class EngineProperty : public ::testing::TestWithParam<int> {};

TEST_P(EngineProperty, EveryBitEqualsPlainLibTorch) {
  const auto first = static_cast<std::uint64_t>(GetParam()) * kSeedsPerPart;
  for (std::uint64_t seed = first; seed < first + kSeedsPerPart; ++seed) {
    const std::string found = judge(draw_case(seed));
    EXPECT_TRUE(found.empty()) << found;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineProperty, ::testing::Range(0, 4),
                         [](const auto& part) { return "Part" + std::to_string(part.param); });

// With ranks that run late and a device whose work may: no bit changes.
constexpr std::uint64_t kFirstDelayedSeed = 100000;
constexpr std::uint64_t kDelayedPerPart = 20;
constexpr std::uint32_t kMaxDelayUs = 30;

class EngineDelays : public ::testing::TestWithParam<int> {};

TEST_P(EngineDelays, ChangeNoBit) {
  const auto first = kFirstDelayedSeed + static_cast<std::uint64_t>(GetParam()) * kDelayedPerPart;
  for (std::uint64_t seed = first; seed < first + kDelayedPerPart; ++seed) {
    CasePlan plan = draw_case(seed);
    if (plan.ranks == 1) {
      plan.ranks = 2;  // alone there is nobody to be late
      plan.shard_size = 2;
    }
    ShardedOptions options;
    options.world.max_delay_us = kMaxDelayUs;
    options.world.seed = seed;
    options.on_mock = true;
    const std::string found = judge(plan, Planted::kNothing, options);
    EXPECT_TRUE(found.empty()) << found;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineDelays, ::testing::Range(0, 4),
                         [](const auto& part) { return "Part" + std::to_string(part.param); });

// A copy of a shard that waited for its update was enqueued behind the second phase of its own
// gather: all ranks stood still.
TEST(EngineSeeds, AGatherInTwoPhasesDoesNotWaitForItself) {
  const std::string found = judge(draw_case(2227));
  EXPECT_TRUE(found.empty()) << found;
}

// A comparison that cannot fail proves nothing.
class PlantedMistake : public ::testing::TestWithParam<int> {};

void expect_found(Planted planted, const char* complaint) {
  int num_found = 0;
  constexpr int kNumCases = 5;
  for (std::uint64_t seed = 0; seed < kNumCases; ++seed) {
    const std::string found = judge(draw_case(seed), planted);
    num_found += found.find(complaint) != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(num_found, kNumCases);
}

// Adam's step does not depend on the size of a gradient; the norm does.
TEST_P(PlantedMistake, InAGradientIsFound) { expect_found(Planted::kGradientOff, "norm "); }
TEST_P(PlantedMistake, InTheSumOverMicroBatchesIsFound) {
  expect_found(Planted::kMicroBatchLeftOut, "norm ");
}
TEST_P(PlantedMistake, InOneElementOfOneParameterIsFound) {
  expect_found(Planted::kParamOff, "element 0 is");
}

INSTANTIATE_TEST_SUITE_P(Seeds, PlantedMistake, ::testing::Values(0),
                         [](const auto&) { return "Planted"; });

}  // namespace
}  // namespace tessera::testing
