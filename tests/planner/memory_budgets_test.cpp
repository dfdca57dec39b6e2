// Budgets where nobody gave any: none where everything fits, and otherwise ones that hold.

#include "tessera/planner/memory_budgets.h"

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

// Large enough that a reserve of 6 % is above the least one.
ModelShapes billions() { return small_gpt(4096, 8, 50304, DType::kBFloat16); }

RankMemory memory_of(std::int64_t device_bytes, std::int64_t host_bytes, int num_ranks = 1) {
  return {{device_bytes, num_ranks}, {host_bytes, num_ranks}};
}

StepMemory activations(std::int64_t bytes) {
  StepMemory step;
  step.activation_bytes = bytes;
  return step;
}

std::optional<DefaultBudgets> budgets_for(const RankMemory& memory, std::int64_t activation_bytes,
                                          const MemoryPlanOptions& options = on_gpu(),
                                          std::int64_t num_micro_batches = 1) {
  return default_budgets(billions(), options, num_micro_batches, activations(activation_bytes),
                         memory);
}

// The least free memory, in steps of 100 bytes, that holds everything with such activations.
std::int64_t enough_for(std::int64_t activation_bytes) {
  const MemoryPlan all = planned(billions(), on_gpu());
  const std::int64_t needed =
      all.device_memory_bytes() + all.full_gradient_bytes + activation_bytes;
  return (needed / (100 - kReservePerCent) + 1) * 100;
}

TEST(SaveBuffer, TakesTheSameAtEverySave) {
  for (const int ranks : {1, 4}) {
    const std::int64_t free_bytes = 64 * kGiB;
    const std::int64_t first = save_buffer_of(free_bytes, 0, ranks);
    EXPECT_EQ(first, (free_bytes - reserve_of(free_bytes)) / (2 * ranks));
    EXPECT_EQ(save_buffer_of(free_bytes - first * ranks, first, ranks), first) << ranks;
  }
  EXPECT_EQ(save_buffer_of(0, 0, 1), 0);
}

TEST(DefaultBudgets, WhatFitsGetsNoBudget) {
  for (const std::int64_t activation_bytes : {std::int64_t{0}, 5 * kGiB}) {
    const std::int64_t enough = enough_for(activation_bytes);
    EXPECT_FALSE(budgets_for(memory_of(enough, 64 * kGiB), activation_bytes));
    EXPECT_TRUE(budgets_for(memory_of(enough - 100, 64 * kGiB), activation_bytes))
        << "one step less";
  }
  EXPECT_FALSE(budgets_for(memory_of(16 * kGiB, 64 * kGiB), kGiB, in_host()))
      << "nothing but gathered parameters is on the GPU";
  EXPECT_FALSE(budgets_for(memory_of(kUnlimited, kUnlimited), kGiB)) << "nothing is known";
}

TEST(DefaultBudgets, LeaveActivationsGradientsAndReserveFreeAndLittleElse) {
  for (const std::int64_t gib : {8, 10, 16, 24}) {
    const std::int64_t room = gib * kGiB - gib * kGiB / 100 * kReservePerCent;
    const auto budgets = budgets_for(memory_of(gib * kGiB, 64 * kGiB), 2 * kGiB);
    ASSERT_TRUE(budgets) << gib;
    const MemoryPlan& plan = budgets->plan;
    const std::int64_t peak = plan.device_memory_bytes() + plan.full_gradient_bytes + 2 * kGiB;
    EXPECT_LE(peak, room) << gib;
    // No more leaves the GPU than has to: a budget that is a hundredth of the GPU larger does not
    // fit, or changes nothing.
    MemoryPlanOptions more = budgets->options;
    more.device_bytes += gib * kGiB / 100;
    const MemoryPlan larger = planned(billions(), more);
    EXPECT_TRUE(larger.params == plan.params ||
                larger.device_memory_bytes() + larger.full_gradient_bytes + 2 * kGiB > room)
        << gib;
    EXPECT_EQ(budgets->options.host_bytes, 64 * kGiB - 64 * kGiB / 100 * kReservePerCent);
    EXPECT_GT(plan.host_memory_bytes(), 0) << gib;
    EXPECT_LE(plan.host_memory_bytes(), budgets->options.host_bytes);
    EXPECT_EQ(plan.params, planned(billions(), budgets->options).params);
  }
}

TEST(DefaultBudgets, CountGradientsAndActivationsAtTheirWorstMomentWhereThatIsKnown) {
  const RankMemory memory = memory_of(16 * kGiB, 64 * kGiB);
  StepMemory step = activations(4 * kGiB);
  const auto as_sum = default_budgets(billions(), on_gpu(), 1, step, memory);
  // Gradients come when activations have gone.
  step.device_peak_bytes = [](const MemoryPlan& plan) {
    return plan.device_memory_bytes() - plan.bytes(Tier::kDevice, Role::kGradient) +
           std::max(4 * kGiB, plan.bytes(Tier::kDevice, Role::kGradient));
  };
  const auto along = default_budgets(billions(), on_gpu(), 1, step, memory);
  ASSERT_TRUE(as_sum && along);
  EXPECT_GT(along->options.device_bytes, as_sum->options.device_bytes);
  EXPECT_LE(step.device_peak_bytes(along->plan), 16 * kGiB - 16 * kGiB / 100 * kReservePerCent);
}

TEST(DefaultBudgets, OfTwoRanksAreHalfOfOnes) {
  const auto one = budgets_for(memory_of(16 * kGiB, 64 * kGiB), kGiB);
  const auto two = budgets_for(memory_of(32 * kGiB, 128 * kGiB, 2), kGiB);
  ASSERT_TRUE(one && two);
  EXPECT_EQ(one->options.device_bytes, two->options.device_bytes);
  EXPECT_EQ(one->options.host_bytes, two->options.host_bytes);
  MemoryPlanOptions cpu;
  cpu.has_nvme = true;
  const ModelShapes model = small_gpt(512, 8, 50304);
  const std::int64_t all = planned(model, cpu).memory_bytes();
  const auto on_cpu = [&](int num_ranks) {
    return default_budgets(model, cpu, 1, {}, memory_of(kUnlimited, all, num_ranks));
  };
  ASSERT_TRUE(on_cpu(1));
  EXPECT_EQ(on_cpu(1)->options.host_bytes, all - reserve_of(all));
  cpu.num_ranks = 2;
  ASSERT_TRUE(on_cpu(2));
  EXPECT_EQ(on_cpu(2)->options.host_bytes, all / 2 - reserve_of(all / 2));
}

TEST(DefaultBudgets, RanksTakeTheShareOfTheOneThatHasLeast) {
  const std::vector<RankMemory> ranks{{{32 * kGiB, 2}, {64 * kGiB, 1}},
                                      {{24 * kGiB, 1}, {96 * kGiB, 4}},
                                      {{80 * kGiB, 4}, {64 * kGiB, 1}}};
  const RankMemory least = least_memory(ranks);
  EXPECT_EQ(least.device.of_rank(), 16 * kGiB);
  EXPECT_EQ(least.device.num_ranks, 2);
  EXPECT_EQ(least.host.of_rank(), 24 * kGiB);
  EXPECT_EQ(least.host.num_ranks, 4);
}

TEST(DefaultBudgets, WhatWasGivenStays) {
  MemoryPlanOptions options = on_gpu();
  options.host_bytes = 40 * kGiB;
  const auto budgets = budgets_for(memory_of(16 * kGiB, 64 * kGiB), kGiB, options);
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->options.host_bytes, 40 * kGiB);
  EXPECT_FALSE(contains(budgets->text(), "--host-budget")) << budgets->text();
  options.device_bytes = 8 * kGiB;
  EXPECT_FALSE(budgets_for(memory_of(16 * kGiB, 64 * kGiB), kGiB, options));
  options = on_gpu();
  options.is_device_given = true;  // as "unlimited"
  options.is_host_given = true;
  EXPECT_FALSE(budgets_for(memory_of(kGiB, kGiB), kGiB, options));
  MemoryPlanOptions cpu;
  cpu.is_host_given = true;
  EXPECT_FALSE(default_budgets(billions(), cpu, 1, {}, memory_of(kUnlimited, kGiB)));
}

TEST(DefaultBudgets, ANumberThatIsMoreThanAllRanksOfAMachineHaveIsRefused) {
  const ModelShapes model = small_gpt(64, 4, 3000);
  const MemoryPlanOptions cpu = with_budget(4 * kMiB);
  const std::int64_t on_cpu = planned(model, cpu).memory_bytes();
  const auto refusal = [&](const ModelShapes& shapes, const MemoryPlanOptions& options,
                           std::int64_t host_bytes, int num_ranks) {
    return refusal_of([&] {
      default_budgets(shapes, options, 1, {}, memory_of(kUnlimited, host_bytes, num_ranks));
    });
  };
  EXPECT_EQ(refusal(model, cpu, 2 * on_cpu, 2), "");
  EXPECT_EQ(refusal(model, cpu, 2 * on_cpu - 1, 1), "");
  const std::string text = refusal(model, cpu, 2 * on_cpu - 1, 2);
  EXPECT_TRUE(contains(text, "lower memory.host to at most")) << text;
  // Of a GPU's plan host memory counts, and nothing else.
  MemoryPlanOptions gpu = in_host();
  gpu.host_bytes = kGiB;
  const std::int64_t in_host_memory = planned(large_gpt(), gpu).host_memory_bytes();
  EXPECT_EQ(refusal(large_gpt(), gpu, in_host_memory, 1), "");
  EXPECT_NE(refusal(large_gpt(), gpu, in_host_memory - 1, 1), "");
}

TEST(DefaultBudgets, HostMemoryIsFoundBesideAGivenBudgetOfTheDevice) {
  MemoryPlanOptions options = on_gpu();
  options.device_bytes = 8 * kGiB;
  const std::int64_t needed = planned(billions(), options).host_memory_bytes();
  EXPECT_FALSE(budgets_for(memory_of(16 * kGiB, 2 * needed), kGiB, options));
  const std::string text =
      refusal_of([&] { budgets_for(memory_of(16 * kGiB, needed / 2), kGiB, options); });
  EXPECT_TRUE(contains(text, "of host memory: ")) << text;
  options.has_nvme = true;
  const auto budgets = budgets_for(memory_of(16 * kGiB, needed / 2), kGiB, options);
  ASSERT_TRUE(budgets);
  EXPECT_TRUE(budgets->plan.uses_nvme) << "what does not fit";
}

TEST(DefaultBudgets, AReserveIsNoMoreThanAnEighthAndRefusesNothing) {
  EXPECT_EQ(reserve_of(100 * kGiB), 6 * kGiB);
  EXPECT_EQ(reserve_of(8 * kGiB), kLeastReserveBytes);
  EXPECT_EQ(reserve_of(kGiB), kGiB / 8);
  // What fits into memory to the byte is trained; one byte less is refused.
  const ModelShapes model = small_gpt(64, 4, 3000);
  MemoryPlanOptions options;
  options.host_bytes = kMiB;
  const std::int64_t least = advised_bytes(refusal_of(model, options));
  const auto of = [&](std::int64_t bytes) {
    return default_budgets(model, MemoryPlanOptions(), 1, activations(kGiB),
                           memory_of(kUnlimited, bytes));
  };
  ASSERT_TRUE(of(least));
  EXPECT_LE(of(least)->plan.memory_bytes(), least);
  EXPECT_NE(refusal_of([&] { of(least - 1); }), "");
}

TEST(DefaultBudgets, WhatFitsNowhereIsRefusedWithTheArithmeticAndARemedy) {
  const auto refusal = [](const RankMemory& memory, std::int64_t activation_bytes,
                          const MemoryPlanOptions& options) {
    return refusal_of([&] { budgets_for(memory, activation_bytes, options); });
  };
  EXPECT_TRUE(contains(refusal(memory_of(8 * kGiB, 8 * kGiB), 2 * kGiB, on_gpu()), "does not fit"));
  const std::string text = refusal(memory_of(16 * kGiB, 64 * kGiB), 16 * kGiB, on_gpu());
  EXPECT_TRUE(contains(text, "activations and full gradients of a micro-batch take up to")) << text;
  EXPECT_TRUE(contains(text, "--recompute")) << text;
}

TEST(DefaultBudgets, ARefusalOnACpuSaysWhatEachRoleNeedsAndWhatEachRankHas) {
  MemoryPlanOptions options;
  options.num_ranks = 3;
  const std::string text = refusal_of(
      [&] { default_budgets(billions(), options, 1, {}, memory_of(kUnlimited, 9 * kGiB, 3)); });
  for (const char* part :
       {"one of 3 ranks needs ", " parameters + ", " gradients + ", " optimizer states",
        "this machine has 3.00 GiB left for each of 3 ranks", "or fewer ranks on each",
        "--nvme DIR", "memory.host = unlimited"}) {
    EXPECT_TRUE(contains(text, part)) << part << " in: " << text;
  }
}

TEST(DefaultBudgets, WithoutKnownActivationsASmallModelStaysOnTheDevice) {
  const MemoryPlan all = planned(billions(), on_gpu());
  const std::int64_t taken = all.device_memory_bytes() + all.full_gradient_bytes;
  const auto of = [](std::int64_t device_bytes, std::int64_t host_bytes, bool has_nvme = false) {
    return default_budgets(billions(), on_gpu({}, {}, has_nvme), 1, {},
                           memory_of(device_bytes, host_bytes));
  };
  EXPECT_FALSE(of(4 * taken, 256 * kGiB));
  const auto first = of(4 * taken - 4, 256 * kGiB);
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->is_for_first_step);
  for (std::size_t i = 0; i < first->plan.params.size(); ++i) {
    const bool is_tiny = is_small(billions(), i);
    EXPECT_EQ(first->plan.params[i].parameter, is_tiny ? Tier::kDevice : Tier::kHost);
    EXPECT_EQ(first->plan.params[i].states, is_tiny ? Tier::kDevice : Tier::kHost);
  }
  EXPECT_LE(first->plan.device_memory_bytes(), taken) << "three quarters are for activations";
  EXPECT_TRUE(contains(first->text(), "the first step runs with shards in host memory"));
  // Where host memory does not hold everything, activations have half of the device.
  const auto mixed = of(16 * kGiB, 24 * kGiB, true);
  ASSERT_TRUE(mixed);
  EXPECT_FALSE(mixed->is_for_first_step);
  EXPECT_EQ(mixed->options.device_bytes, 8 * kGiB);
}

TEST(DefaultBudgets, OneLineSaysWhatWasChosenAndHowToChangeIt) {
  const auto budgets = budgets_for(memory_of(32 * kGiB, 128 * kGiB, 2), 2 * kGiB);
  ASSERT_TRUE(budgets);
  const std::string text = budgets->text();
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  for (const char* part : {"the device has 16.0 GiB for each of 2 ranks free",
                           "memory.device = ", "memory.host = 60.2 GiB", "--device-budget SIZE",
                           "--device-budget unlimited"}) {
    EXPECT_TRUE(contains(text, part)) << part << " in: " << text;
  }
}

}  // namespace
}  // namespace tessera::planner
