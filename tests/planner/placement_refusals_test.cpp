// What cannot be had is refused with the arithmetic and a remedy that works.
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/machine_limits.h"
#include "tessera/planner/memory_planner.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The number behind "to at least ".
TEST(PlacementRefusal, WithoutNvmeShowsTheSumAndNamesBothRemedies) {
  const ModelShapes model = small_gpt(64, 4, 3000);
  MemoryPlanOptions options = with_budget(std::int64_t{1} << 20);
  options.has_nvme = false;
  const std::string text = refusal_of([&] { plan_memory(model, options, 1); });
  EXPECT_TRUE(contains(text, "parameters + ")) << text;
  EXPECT_TRUE(contains(text, "optimizer states")) << text;
  EXPECT_TRUE(contains(text, "memory.host allows 1.00 MiB")) << text;
  EXPECT_TRUE(contains(text, "--nvme DIR")) << text;
  options.host_bytes = advised_bytes(text);
  EXPECT_FALSE(plan_memory(model, options, 1).uses_nvme);
  --options.host_bytes;
  EXPECT_FALSE(refusal_of([&] { plan_memory(model, options, 1); }).empty());
}

TEST(PlacementRefusal, WithNvmeNamesTheUnitAndTheSmallestBudgetThatWorks) {
  for (const int num_ranks : {1, 2}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const ModelShapes model = small_gpt(64, 4, 3000, dtype);
      MemoryPlanOptions options = with_budget(100000, num_ranks);
      const std::string text = refusal_of([&] { plan_memory(model, options, 1); });
      EXPECT_TRUE(contains(text, "arena (unit 'embedding')")) << text;
      EXPECT_TRUE(contains(text, "optimizer buffers")) << text;
      options.host_bytes = advised_bytes(text);
      // Buckets grow with the budget, up to a sixteenth of it.
      if (num_ranks > 1) {
        options.host_bytes += options.host_bytes;
      }
      EXPECT_TRUE(plan_memory(model, options, 1).uses_nvme);
    }
  }
}

TEST(PlacementRefusal, NamesTheBudgetThatBinds) {
  MemoryPlanOptions options = with_budget(1 << 20);
  options.device_bytes = 1 << 18;
  const std::string text = refusal_of([&] { plan_memory(small_gpt(64, 1, 3000), options, 1); });
  EXPECT_TRUE(contains(text, "memory.device allows 256 KiB")) << text;
}

TEST(PlacementRefusal, NvmeBudgetIsKept) {
  const ModelShapes model = small_gpt(64, 4, 3000);
  MemoryPlanOptions options = with_budget(std::int64_t{4} << 20);
  const std::int64_t stored = plan_memory(model, options, 1).bytes(Tier::kNvme);
  options.nvme_bytes = stored;
  EXPECT_EQ(plan_memory(model, options, 1).bytes(Tier::kNvme), stored);
  --options.nvme_bytes;
  const std::string text = refusal_of([&] { plan_memory(model, options, 1); });
  EXPECT_TRUE(contains(text, "Raise memory.nvme to " + exact_bytes(stored))) << text;
}

class MachineFit : public testing::Test {
 protected:
  MachineFit() : placement_(plan_memory(small_gpt(64, 4, 3000), with_budget(4 << 20), 1)) {
    limits_.memory_available_bytes = 1 << 30;
    limits_.directories = {{"/disk-a", 1 << 30}, {"/disk-b", 1 << 30}};
  }
  std::string refusal(int num_ranks) const {
    return refusal_of([&] { check_fits(placement_, limits_, num_ranks); });
  }
  const MemoryPlan placement_;
  MachineLimits limits_;
};

TEST_F(MachineFit, IsSilentWhereThereIsEnough) { EXPECT_EQ(refusal(4), ""); }

TEST_F(MachineFit, CountsTheMemoryOfAllRanksOfAMachine) {
  limits_.memory_available_bytes = 2 * placement_.memory_bytes();
  EXPECT_EQ(refusal(2), "");
  limits_.memory_available_bytes -= 1;
  EXPECT_EQ(refusal(1), "");
  EXPECT_TRUE(contains(refusal(2), "lower memory.host to at most")) << refusal(2);
}

TEST_F(MachineFit, CountsTheSpaceOfAllRanksOnEachDirectory) {
  limits_.directories[1].free_bytes = placement_.bytes(Tier::kNvme);
  EXPECT_EQ(refusal(2), "");
  limits_.directories[1].free_bytes -= 8192;
  EXPECT_TRUE(contains(refusal(2), "/disk-b")) << refusal(2);
}

TEST_F(MachineFit, PinnedMemoryNeedsALimitOnLocksThatAllowsIt) {
  MemoryPlan placement = placement_;
  placement.ledger.push_back({Tier::kPinned, Role::kStaging, 1 << 20});
  limits_.locked_bytes = (1 << 20) - 1;
  EXPECT_TRUE(contains(refusal_of([&] { check_fits(placement, limits_, 1); }), "ulimit -l"));
  EXPECT_EQ(refusal(1), "");
}

TEST(MachineLimitsTest, AsksThisMachine) {
  const MachineLimits limits = MachineLimits::of_this_machine({"/", "/there/is/no/such/place"});
  EXPECT_GT(limits.memory_available_bytes, 0);
  ASSERT_EQ(limits.directories.size(), 1U);
  EXPECT_EQ(limits.directories[0].path, "/");
}

}  // namespace
}  // namespace tessera::planner
