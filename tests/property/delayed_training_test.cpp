// Delays in gathers, reductions, copies and updates change no bit.
#include "tests/property/delayed_training.h"

#include <cstdint>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include "testing/thread_backend.h"
#include "tests/support/sizes.h"

namespace tessera::testing {
namespace {

constexpr std::uint64_t kRunsPerPart = support::rounds(40U, 15U);
constexpr std::uint32_t kMaxDelayUs = 30;

std::string findings_of(const TrainingPlan& plan, const Versions& expected) {
  comm::ThreadWorldOptions world;
  world.num_ranks = plan.ranks;
  world.seed = plan.seed;
  world.max_delay_us = kMaxDelayUs;
  comm::GroupOptions options;
  options.pack_below_bytes = plan.pack_below_bytes;
  std::mutex mutex;
  std::string found;
  comm::run_ranks(world, options, [&](comm::Group& group) {
    for (const std::string& line : RankTraining(group, plan, expected).run()) {
      const std::lock_guard lock(mutex);
      found += line + "\n";
    }
  });
  return found;
}

class DelayedTraining : public ::testing::TestWithParam<int> {};

TEST_P(DelayedTraining, EqualsTrainingAtOnceToTheBit) {
  const auto first = static_cast<std::uint64_t>(GetParam()) * kRunsPerPart;
  for (std::uint64_t seed = first; seed < first + kRunsPerPart; ++seed) {
    const TrainingPlan plan = draw_training(seed);
    const std::string found = findings_of(plan, train_at_once(plan));
    EXPECT_TRUE(found.empty()) << found << plan.describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DelayedTraining, ::testing::Range(0, 4),
                         [](const auto& part) { return "Part" + std::to_string(part.param); });

// A comparison that cannot fail proves nothing.
class DelayedTrainingMistake : public ::testing::TestWithParam<int> {};

TEST_P(DelayedTrainingMistake, InOneElementIsFound) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const TrainingPlan plan = draw_training(seed);
    Versions expected = train_at_once(plan);
    for (std::size_t p = 0; p < plan.numels.size(); ++p) {
      if (plan.numels[p] > 0) {
        expected.back()[p].back() += 0.5F;
      }
    }
    EXPECT_NE(findings_of(plan, expected).find("at the end"), std::string::npos) << plan.describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DelayedTrainingMistake, ::testing::Values(0),
                         [](const auto&) { return "Planted"; });

}  // namespace
}  // namespace tessera::testing
