// Budgets where nobody gave any: none where everything fits, and otherwise ones that hold.

#include "cli/default_budgets.h"

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::cli {
namespace {

using planner::contains;
using planner::in_host;
using planner::kGiB;
using planner::MemoryPlan;
using planner::MemoryPlanOptions;
using planner::ModelShapes;
using planner::on_gpu;
using planner::planned;
using planner::refusal_of;
using planner::small_gpt;

// Large enough that a reserve of 6 % is above the least one.
ModelShapes billions() { return small_gpt(4096, 8, 50304, DType::kBFloat16); }

std::optional<DefaultBudgets> budgets_for(const FreeMemory& free, std::int64_t activation_bytes,
                                          const MemoryPlanOptions& options = on_gpu(),
                                          std::int64_t num_micro_batches = 1) {
  return default_budgets(billions(), options, num_micro_batches, activation_bytes, free);
}

// The least free memory, in steps of 100 bytes, that holds everything with such activations.
std::int64_t enough_for(std::int64_t activation_bytes) {
  const MemoryPlan all = planned(billions(), on_gpu());
  const std::int64_t needed =
      all.device_memory_bytes() + all.full_gradient_bytes + activation_bytes;
  return (needed / (100 - kReservePerCent) + 1) * 100;
}

TEST(DefaultBudgets, WhatFitsGetsNoBudget) {
  for (const std::int64_t activations : {std::int64_t{0}, 5 * kGiB}) {
    const std::int64_t enough = enough_for(activations);
    EXPECT_FALSE(budgets_for({enough, 0}, activations));
    EXPECT_TRUE(budgets_for({enough - 100, 64 * kGiB}, activations)) << "one step less";
  }
  EXPECT_FALSE(budgets_for({16 * kGiB, 64 * kGiB}, kGiB, in_host()))
      << "nothing but gathered parameters is on the GPU";
  EXPECT_TRUE(budgets_for({enough_for(0), 64 * kGiB}, 0, on_gpu(), 2))
      << "several micro-batches are summed on the device in fp32";
}

TEST(DefaultBudgets, ActivationsGradientAndReserveAreLeftFree) {
  const MemoryPlan all = planned(billions(), on_gpu());
  const auto budgets = budgets_for({16 * kGiB, 64 * kGiB}, 3 * kGiB);
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->reserve_bytes, 16 * kGiB / 100 * kReservePerCent);
  EXPECT_EQ(budgets->device_bytes,
            16 * kGiB - 3 * kGiB - all.full_gradient_bytes - kGiB - budgets->reserve_bytes)
      << "a 16th for gradients that are being copied";
  EXPECT_EQ(budgets->planned_bytes, all.device_memory_bytes());
  EXPECT_EQ(budgets->host_bytes, 64 * kGiB - 64 * kGiB / 100 * kReservePerCent);
}

TEST(DefaultBudgets, ThePlanThatFollowsFitsAndUsesHostMemory) {
  for (const std::int64_t gib : {4, 6, 8, 10, 16, 24}) {
    const auto budgets = budgets_for({gib * kGiB, 64 * kGiB}, 2 * kGiB);
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
  const auto budgets = budgets_for({16 * kGiB, 64 * kGiB}, kGiB, options);
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->host_bytes, 40 * kGiB);
  EXPECT_FALSE(contains(budgets->text(), "--host-budget")) << budgets->text();
}

TEST(DefaultBudgets, SmallMemoryKeepsTheLeastReserve) {
  const ModelShapes model = small_gpt(2048, 8, 50304, DType::kBFloat16);
  const auto budgets = default_budgets(model, on_gpu(), 1, 0, {8 * kGiB, 8 * kGiB});
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->reserve_bytes, kLeastReserveBytes);
  EXPECT_EQ(budgets->host_bytes, 8 * kGiB - kLeastReserveBytes);
}

TEST(DefaultBudgets, WhatFitsNowhereIsRefusedWithTheArithmeticAndARemedy) {
  MemoryPlanOptions by_the_gpu = on_gpu();
  by_the_gpu.cpu_share = 0;
  const auto refusal = [](const FreeMemory& free, std::int64_t activation_bytes,
                          const MemoryPlanOptions& options) {
    return refusal_of([&] { budgets_for(free, activation_bytes, options); });
  };
  EXPECT_TRUE(contains(refusal({8 * kGiB, 8 * kGiB}, 2 * kGiB, on_gpu()), "does not fit"));
  EXPECT_TRUE(contains(refusal({6 * kGiB, 64 * kGiB}, 2 * kGiB, by_the_gpu), "does not fit"))
      << "a share that is given stays";
  const std::string activations = refusal({16 * kGiB, 64 * kGiB}, 16 * kGiB, on_gpu());
  EXPECT_TRUE(contains(activations, "activations of a micro-batch take up to 17.4 GiB"))
      << activations;
  EXPECT_TRUE(contains(activations, "--recompute")) << activations;
}

TEST(DefaultBudgets, OneLineSaysWhatWasChosenAndHowToChangeIt) {
  const auto budgets = budgets_for({16 * kGiB, 64 * kGiB}, 2 * kGiB);
  ASSERT_TRUE(budgets);
  const std::string text = budgets->text();
  EXPECT_EQ(text.find('\n'), text.size() - 1) << text;
  for (const char* part : {"the GPU has 16.0 GiB free", "activations up to 3.38 GiB",
                           "983 MiB stay in reserve", "memory.device = ", "memory.host = 60.2 GiB",
                           "--device-budget SIZE", "--device-budget unlimited"}) {
    EXPECT_TRUE(contains(text, part)) << part << " in: " << text;
  }
}

}  // namespace
}  // namespace tessera::cli
