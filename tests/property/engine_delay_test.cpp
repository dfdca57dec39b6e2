// The property test again, with ranks that run late: delays in gathers and reductions change no
// bit.
#include <cstdint>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "testing/mock_device.h"
#include "tests/property/random_case.h"

namespace tessera::testing {
namespace {

constexpr std::uint64_t kFirstSeed = 100000;
constexpr std::uint64_t kRunsPerPart = 20;
constexpr std::uint32_t kMaxDelayUs = 30;

RuntimeOptions late_runtime(std::uint64_t seed, int rank) {
  RuntimeOptions options{-1, 1};
  options.make_device = [seed, rank](device::CpuDeviceOptions host) {
    device::MockDeviceOptions late;
    late.mode = seed % 2 == 0 ? device::LateMode::kLazy : device::LateMode::kRandom;
    late.seed = seed * 8 + static_cast<std::uint64_t>(rank);
    late.host = std::move(host);
    return device::make_mock_device(std::move(late));
  };
  return options;
}

class EngineDelays : public ::testing::TestWithParam<int> {};

TEST_P(EngineDelays, ChangeNoBit) {
  const auto first = kFirstSeed + static_cast<std::uint64_t>(GetParam()) * kRunsPerPart;
  for (std::uint64_t seed = first; seed < first + kRunsPerPart; ++seed) {
    CasePlan plan = draw_case(seed);
    if (plan.ranks == 1) {
      plan.ranks = 2;  // alone there is nobody to be late
    }
    ShardedOptions options;
    options.world.max_delay_us = kMaxDelayUs;
    options.world.seed = seed;
    options.runtime = [seed](int rank) { return late_runtime(seed, rank); };
    const std::string found = judge(plan, Planted::kNothing, options);
    EXPECT_TRUE(found.empty()) << found;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineDelays, ::testing::Range(0, 4),
                         [](const auto& part) { return "Part" + std::to_string(part.param); });

}  // namespace
}  // namespace tessera::testing
