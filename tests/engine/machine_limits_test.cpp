// A plan that this machine cannot hold is refused before anything is allocated.
#include "tessera/engine/machine_limits.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::engine {
namespace {

class MachineFit : public ::testing::Test {
 protected:
  MachineFit()
      : plan_(planner::planned(planner::small_gpt(64, 4, 3000), planner::with_budget(4 << 20))) {
    limits_.directories = {{"/disk-a", planner::kGiB}, {"/disk-b", planner::kGiB}};
  }
  std::string refusal(int num_ranks) const {
    return planner::refusal_of([&] { check_fits(plan_, limits_, num_ranks); });
  }
  planner::MemoryPlan plan_;
  MachineLimits limits_;
};

TEST_F(MachineFit, CountsTheSpaceOfAllRanksOnEachDirectory) {
  limits_.directories[1].free_bytes = plan_.bytes(Tier::kNvme);
  EXPECT_EQ(refusal(2), "");
  limits_.directories[1].free_bytes -= 8192;
  EXPECT_TRUE(planner::contains(refusal(2), "/disk-b")) << refusal(2);
}

TEST_F(MachineFit, PinnedMemoryNeedsALimitOnLocksThatAllowsIt) {
  limits_.locked_bytes = planner::kMiB - 1;
  EXPECT_EQ(refusal(1), "");
  plan_.ledger.push_back({Tier::kPinned, Role::kStaging, planner::kMiB});
  EXPECT_TRUE(planner::contains(refusal(1), "ulimit -l"));
}

TEST_F(MachineFit, OfAGpuAsksForNoLimitOnLocks) {
  plan_ = planner::planned(planner::large_gpt(), planner::in_host());
  limits_.locked_bytes = 0;
  EXPECT_EQ(refusal(1), "");
}

TEST(MachineLimitsTest, AsksThisMachine) {
  const MachineLimits limits = MachineLimits::of_this_machine({"/", "/there/is/no/such/place"});
  ASSERT_EQ(limits.directories.size(), 1U);
  EXPECT_EQ(limits.directories[0].path, "/");
}

}  // namespace
}  // namespace tessera::engine
