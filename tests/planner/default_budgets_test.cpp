// Budgets where nobody gave any: none where everything fits, and otherwise ones that hold.

#include "tessera/planner/default_budgets.h"

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

// Large enough that a reserve of 6 % is above the least one.
ModelShapes billions() { return small_gpt(4096, 8, 50304, DType::kBFloat16); }

std::int64_t resident_bytes() { return planned(billions(), on_gpu()).device_memory_bytes(); }

std::int64_t gradient_bytes() { return planned(billions(), on_gpu()).full_gradient_bytes; }

// The least free memory, in steps of 100 bytes, that holds everything with such activations.
std::int64_t enough_for(std::int64_t activation_bytes) {
  const std::int64_t needed = resident_bytes() + gradient_bytes() + activation_bytes;
  return (needed / (100 - kReservePerCent) + 1) * 100;
}

TEST(DefaultBudgets, WhatFitsGetsNoBudget) {
  for (const std::int64_t activations : {std::int64_t{0}, 5 * kGiB}) {
    const std::int64_t enough = enough_for(activations);
    EXPECT_FALSE(default_budgets(billions(), on_gpu(), 1, activations, {enough, 0}));
    EXPECT_TRUE(default_budgets(billions(), on_gpu(), 1, activations, {enough - 100, 64 * kGiB}))
        << "one step less";
  }
}

TEST(DefaultBudgets, ActivationsGradientAndReserveAreLeftFree) {
  const FreeMemory free{16 * kGiB, 64 * kGiB};
  const auto budgets = default_budgets(billions(), on_gpu(), 1, 3 * kGiB, free);
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->reserve_bytes, 16 * kGiB / 100 * kReservePerCent);
  EXPECT_EQ(budgets->device_bytes,
            16 * kGiB - 3 * kGiB - gradient_bytes() - kGiB - budgets->reserve_bytes)
      << "a 16th for gradients on their way";
  EXPECT_EQ(budgets->planned_bytes, resident_bytes());
  EXPECT_EQ(budgets->host_bytes, 64 * kGiB - 64 * kGiB / 100 * kReservePerCent);
}

TEST(DefaultBudgets, ThePlanThatFollowsFitsAndUsesHostMemory) {
  for (const std::int64_t gib : {4, 6, 8, 10, 16, 24}) {
    const FreeMemory free{gib * kGiB, 64 * kGiB};
    const auto budgets = default_budgets(billions(), on_gpu(), 1, 2 * kGiB, free);
    ASSERT_TRUE(budgets) << gib;
    MemoryPlanOptions options = on_gpu();
    options.device_bytes = budgets->device_bytes;
    options.host_bytes = budgets->host_bytes;
    options.cpu_share = budgets->cpu_share;
    EXPECT_EQ(budgets->cpu_share, gib < 8 ? 1 : -1) << "gradients of the GPU's share";
    const MemoryPlan plan = planned(billions(), options);
    EXPECT_LE(plan.device_memory_bytes() + 2 * kGiB + plan.full_gradient_bytes,
              gib * kGiB - gib * kGiB / 100 * kReservePerCent);
    EXPECT_GT(plan.host_memory_bytes(), 0) << gib;
    EXPECT_LE(plan.host_memory_bytes(), 62 * kGiB);
    // No more leaves the GPU than has to: what is left of its budget holds no more states.
    if (gib >= 8) {
      EXPECT_GT(plan.device_memory_bytes(), budgets->device_bytes * 8 / 10) << gib;
    }
  }
}

TEST(DefaultBudgets, AGivenBudgetOfHostMemoryStays) {
  MemoryPlanOptions options = on_gpu();
  options.host_bytes = 40 * kGiB;
  const auto budgets = default_budgets(billions(), options, 1, kGiB, {16 * kGiB, 64 * kGiB});
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->host_bytes, 40 * kGiB);
  EXPECT_EQ(budgets->text().find("--host-budget"), std::string::npos) << budgets->text();
}

TEST(DefaultBudgets, WishesCountForWhatIsNeeded) {
  const FreeMemory free{16 * kGiB, 64 * kGiB};
  EXPECT_TRUE(default_budgets(billions(), on_gpu(), 1, kGiB, free));
  EXPECT_FALSE(default_budgets(billions(), in_host(), 1, kGiB, free))
      << "nothing but gathered parameters is on the GPU";
  // Several micro-batches are summed on the device in fp32.
  const std::int64_t enough = enough_for(0);
  EXPECT_FALSE(default_budgets(billions(), on_gpu(), 1, 0, {enough, 0}));
  EXPECT_TRUE(default_budgets(billions(), on_gpu(), 2, 0, {enough, 64 * kGiB}));
}

TEST(DefaultBudgets, SmallMemoryKeepsTheLeastReserve) {
  const ModelShapes model = small_gpt(2048, 8, 50304, DType::kBFloat16);
  const auto budgets = default_budgets(model, on_gpu(), 1, 0, {8 * kGiB, 8 * kGiB});
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->reserve_bytes, kLeastReserveBytes);
  EXPECT_EQ(budgets->host_bytes, 8 * kGiB - kLeastReserveBytes);
}

TEST(DefaultBudgets, WhatFitsNowhereIsRefusedWithTheArithmetic) {
  const auto refusal = [](MemoryPlanOptions options, FreeMemory free) {
    return refusal_of([&] { default_budgets(billions(), options, 1, 2 * kGiB, free); });
  };
  EXPECT_NE(refusal(on_gpu(), {8 * kGiB, 8 * kGiB}).find("does not fit"), std::string::npos);
  MemoryPlanOptions by_the_gpu = on_gpu();
  by_the_gpu.cpu_share = 0;
  EXPECT_NE(refusal(by_the_gpu, {6 * kGiB, 64 * kGiB}).find("does not fit"), std::string::npos)
      << "a share that is given stays";
}

TEST(DefaultBudgets, ActivationsThatFillTheGpuAreRefusedWithARemedy) {
  const std::string refusal = refusal_of(
      [] { default_budgets(billions(), on_gpu(), 1, 16 * kGiB, {16 * kGiB, 64 * kGiB}); });
  EXPECT_NE(refusal.find("activations of a micro-batch take up to 17.4 GiB"), std::string::npos)
      << refusal;
  EXPECT_NE(refusal.find("--recompute"), std::string::npos) << refusal;
}

TEST(DefaultBudgets, OneLineSaysWhatWasChosenAndHowToChangeIt) {
  const auto budgets = default_budgets(billions(), on_gpu(), 1, 2 * kGiB, {16 * kGiB, 64 * kGiB});
  ASSERT_TRUE(budgets);
  const std::string text = budgets->text();
  EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
  for (const char* part : {"the GPU has 16.0 GiB free", "activations up to 3.38 GiB",
                           "983 MiB stay in reserve", "memory.device = ", "memory.host = 60.2 GiB",
                           "--device-budget SIZE", "--device-budget unlimited"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

}  // namespace
}  // namespace tessera::planner
