// What lives where, who updates it, how large everything becomes, and how budgets decide: over
// small models and many budgets, on a CPU and on a GPU.
#include "tessera/planner/memory_planner.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tessera/planner/memory_cost.h"
#include "tests/planner/plan_cases.h"
#include "tests/support/sizes.h"

namespace tessera::planner {
namespace {

bool has_on_nvme(const MemoryPlan& plan, Tier Placement::*role) {
  return std::any_of(plan.params.begin(), plan.params.end(),
                     [role](const Placement& each) { return each.*role == Tier::kNvme; });
}

std::vector<std::size_t> large_ids(const ModelShapes& model) {
  std::vector<std::size_t> ids;
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    if (!is_small(model, i)) {
      ids.push_back(i);
    }
  }
  return ids;
}

// How many large ones, from the first used on, are there; fails if one is that is used later.
std::size_t num_leading(const ModelShapes& model, const MemoryPlan& plan, Tier Placement::*role,
                        Tier tier) {
  std::size_t count = 0;
  bool has_ended = false;
  for (const std::size_t id : large_ids(model)) {
    const bool is_there = plan.params[id].*role == tier;
    EXPECT_FALSE(is_there && has_ended) << model.params[id].name;
    has_ended = has_ended || !is_there;
    count += is_there ? 1 : 0;
  }
  return count;
}

// One size of buckets, so that budgets can be compared to the byte.
MemoryPlanOptions with_fixed_buckets(int num_ranks) {
  MemoryPlanOptions options = with_budget(kUnlimited, num_ranks);
  options.bucket_bytes = kMiB;
  options.is_bucket_given = true;
  return options;
}

TEST(CpuPlan, KeepsEverythingInMemoryWithoutABudget) {
  const Placement in_memory{Tier::kDevice, Tier::kDevice, Tier::kDevice, Updater::kCpu};
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 3}) {
      MemoryPlanOptions options;
      options.num_ranks = num_ranks;
      const MemoryPlan plan = planned(model, options);
      EXPECT_FALSE(plan.uses_nvme);
      EXPECT_EQ(plan.params, std::vector<Placement>(model.params.size(), in_memory));
      EXPECT_EQ(plan.live_limit_bytes, options.live_limit_bytes);
      EXPECT_EQ(plan.bytes(Tier::kDevice) + plan.comm_bytes, plan.memory_bytes());
      EXPECT_EQ(plan.step.read() + plan.step.written(), 0);
    }
  }
}

TEST(CpuPlan, KeepsEverythingInMemoryWhereItFitsToTheByte) {
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 2}) {
      MemoryPlanOptions options = with_fixed_buckets(num_ranks);
      options.host_bytes = planned(model, options).memory_bytes();
      const MemoryPlan plan = planned(model, options);
      EXPECT_FALSE(plan.uses_nvme);
      EXPECT_EQ(plan.memory_bytes(), options.host_bytes);
      EXPECT_EQ(plan.optimizer_pool_bytes + plan.gradient_pool_bytes + plan.parameter_pool_bytes,
                0);
    }
  }
}

TEST(CpuPlan, ArenaShrinksBeforeAnyShardLeaves) {
  const ModelShapes model = small_gpt(64, 4, 2000);
  MemoryPlanOptions options = with_fixed_buckets(2);
  const MemoryPlan whole = planned(model, options);
  options.host_bytes = whole.memory_bytes() - 300 * 1024;
  const MemoryPlan tight = planned(model, options);
  EXPECT_FALSE(tight.uses_nvme);
  EXPECT_LT(tight.arena_bytes, whole.arena_bytes);
  EXPECT_EQ(tight.live_limit_bytes, tight.arena_bytes);
}

// Only the plan's arithmetic is run: 300 million parameters, bf16, 3.6 GB of states.
TEST(StatesOnNvme, HaveAnEighthOfThemAsBuffersWhereMemoryIsNotShort) {
  const ModelShapes model = equal_units(30, {10 * kMiB}, DType::kBFloat16);
  for (const bool is_discrete : {false, true}) {
    SCOPED_TRACE(is_discrete ? "beside a device" : "in one memory");
    MemoryPlanOptions options = with_budget(kUnlimited, 1);
    options.is_discrete = is_discrete;
    options.optimizer = Tier::kNvme;
    const MemoryPlan plan = planned(model, options);
    const std::int64_t states = plan.bytes(Tier::kNvme, Role::kOptimizer);
    const std::int64_t each = plan.optimizer_pool_bytes / plan.num_optimizer_buffers;
    EXPECT_EQ(states, 12 * 30 * 10 * kMiB);
    EXPECT_EQ(each, 24 * kMiB);
    EXPECT_LE(plan.optimizer_pool_bytes, states / 8);
    EXPECT_GT(plan.optimizer_pool_bytes + each, states / 8);

    MemoryPlanOptions given = options;
    given.optimizer_buffers = 3;
    EXPECT_EQ(planned(model, given).num_optimizer_buffers, 3);
    // At most 1 GiB.
    const MemoryPlan large = planned(equal_units(120, {10 * kMiB}, DType::kBFloat16), options);
    EXPECT_EQ(large.num_optimizer_buffers, kGiB / each);
    // What is short keeps states instead.
    MemoryPlanOptions tight = options;
    tight.optimizer = std::nullopt;
    tight.host_bytes = 2 * kGiB;
    tight.device_bytes = is_discrete ? kGiB : kUnlimited;
    EXPECT_LE(planned(model, tight).num_optimizer_buffers, 4);
  }
}

// The heart: any budget gives a plan within it, or a refusal; a larger one never puts more on NVMe,
// and never refuses what a smaller one allowed.
TEST(CpuPlan, SumsStayWithinEveryBudgetAndALargerOneNeverStoresMore) {
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 2, 3}) {
      const std::int64_t all =
          planned(model, with_budget(kUnlimited, num_ranks)).memory_bytes() + 2 * kMiB;
      std::set<std::int64_t> budgets{all - 4096, all - 1, all, all + 1, all + 4096};
      for (std::int64_t i = 1; i <= 150; ++i) {
        budgets.insert(all * i / 125);
      }
      std::int64_t stored_before = kUnlimited;
      bool was_possible = false;
      for (const std::int64_t budget : budgets) {
        SCOPED_TRACE(testing::Message() << model.params.front().name << " on " << num_ranks
                                        << " ranks within " << budget);
        MemoryPlan plan;
        try {
          plan = planned(model, with_budget(budget, num_ranks));
        } catch (const ConfigError&) {
          ASSERT_FALSE(was_possible);
          continue;
        }
        was_possible = true;
        ASSERT_LE(plan.memory_bytes(), budget);
        const std::int64_t stored = plan.bytes(Tier::kNvme);
        ASSERT_LE(stored, stored_before);
        ASSERT_EQ(plan.uses_nvme, stored > 0);
        stored_before = stored;
      }
      EXPECT_EQ(stored_before, 0) << "the largest budget holds everything";
    }
  }
}

TEST(CpuPlan, StatesLeaveMemoryFirstThenGradientsThenParametersAlsoIfAskedToBeInHostMemory) {
  const ModelShapes model = small_gpt(64, 6, 3000);
  const std::int64_t all = planned(model, with_budget(kUnlimited)).memory_bytes();
  for (const std::optional<Tier> wish : std::vector<std::optional<Tier>>{{}, Tier::kHost}) {
    bool saw_states = false;
    bool saw_gradients = false;
    bool saw_parameters = false;
    for (std::int64_t part = 99; part >= 20; --part) {
      MemoryPlanOptions options = with_budget(all * part / 100);
      options.parameters = wish;
      options.optimizer = wish;
      MemoryPlan plan;
      try {
        plan = planned(model, options);
      } catch (const ConfigError&) {
        break;
      }
      const bool states = has_on_nvme(plan, &Placement::states);
      const bool gradients = has_on_nvme(plan, &Placement::gradient);
      const bool parameters = has_on_nvme(plan, &Placement::parameter);
      EXPECT_TRUE(!gradients || states);
      EXPECT_TRUE(!parameters || gradients);
      saw_states = saw_states || states;
      saw_gradients = saw_gradients || gradients;
      saw_parameters = saw_parameters || parameters;
    }
    EXPECT_TRUE(saw_states && saw_gradients && saw_parameters);
  }
}

TEST(CpuPlan, SmallParametersStayWhereLargeOnesThatAreUsedEarlierDoNot) {
  const ModelShapes model = small_gpt(32, 2, 20000);
  const MemoryPlan plan = planned(model, with_budget(5 * kMiB));
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    EXPECT_EQ(plan.params[i].parameter, is_small(model, i) ? Tier::kDevice : Tier::kNvme)
        << model.params[i].name;
  }
}

TEST(CpuPlan, ArenaHoldsTheLargestUnitThatIsGathered) {
  const ModelShapes model = small_gpt(64, 6, 3000);
  const std::int64_t all = planned(model, with_budget(kUnlimited)).memory_bytes();
  for (const int num_ranks : {1, 2}) {
    const MemoryPlan plan = planned(model, with_budget(all / 6 * num_ranks, num_ranks));
    for (const std::vector<int>& unit : model.units) {
      std::int64_t gathered = 0;
      for (const int id : unit) {
        const auto i = static_cast<std::size_t>(id);
        const bool is_on_nvme = plan.params[i].parameter == Tier::kNvme;
        gathered += num_ranks > 1 || is_on_nvme ? 4 * model.params[i].numel : 0;
      }
      EXPECT_GE(plan.arena_bytes, gathered);
    }
    EXPECT_EQ(plan.live_limit_bytes, plan.arena_bytes);
  }
  // Alone and with all parameters in memory, nothing is gathered.
  EXPECT_EQ(planned(model, with_budget(all * 3 / 4)).arena_bytes, 0);
}

TEST(GpuPlan, KeepsEverythingOnTheDeviceWithoutABudget) {
  for (const ModelShapes& model : small_models()) {
    const MemoryPlan plan = planned(model, on_gpu());
    EXPECT_EQ(plan.params, std::vector<Placement>(model.params.size()));
    EXPECT_EQ(plan.host_memory_bytes(), 0);
    EXPECT_EQ(plan.link.h2d + plan.link.d2h, 0);
    EXPECT_EQ(plan.arena_bytes, 0);
    EXPECT_EQ(plan.num_update_slots, 0);
    EXPECT_EQ(plan.cpu_share, 0);
  }
}

TEST(GpuPlan, SmallParametersAreOnTheDeviceWhateverIsAskedFor) {
  const ModelShapes model = large_gpt();
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    const MemoryPlan plan = planned(model, on_gpu(tier, tier, true));
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      const Placement& each = plan.params[i];
      EXPECT_EQ(each.parameter, is_small(model, i) ? Tier::kDevice : tier);
      EXPECT_EQ(each.states, is_small(model, i) ? Tier::kDevice : tier);
      EXPECT_TRUE(device_updates(each) || !is_small(model, i));
    }
  }
}

TEST(GpuPlan, GradientsAreWhereTheUpdateIsAndNotOnNvmeWithoutABudget) {
  for (const Tier parameters : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    for (const std::optional<Tier> optimizer :
         {std::optional(Tier::kDevice), std::optional(Tier::kHost), std::optional(Tier::kNvme),
          std::optional<Tier>()}) {
      if (parameters == Tier::kNvme && optimizer == Tier::kDevice) {
        continue;  // refused
      }
      for (const Placement& each :
           planned(large_gpt(), on_gpu(parameters, optimizer, true)).params) {
        EXPECT_TRUE(each.parameter != Tier::kNvme || !device_updates(each));
        EXPECT_EQ(each.gradient, device_updates(each) ? Tier::kDevice : Tier::kHost);
        EXPECT_TRUE(each.states != Tier::kDevice || device_updates(each));
        EXPECT_TRUE(each.states != Tier::kNvme || !device_updates(each));
      }
    }
  }
}

// What is written to NVMe is written from host memory.
TEST(GpuPlan, TheCpuUpdatesWhatIsOnNvme) {
  const ModelShapes model = large_gpt();
  const MemoryPlan plan = planned(model, on_gpu(Tier::kNvme, Tier::kHost, true));
  for (const std::size_t id : large_ids(model)) {
    EXPECT_EQ(plan.params[id].states, Tier::kHost);
    EXPECT_FALSE(device_updates(plan.params[id]));
  }
  EXPECT_EQ(plan.cpu_share, 1);
  EXPECT_EQ(plan.num_update_slots, 0);
}

TEST(GpuPlan, TheCpuGetsTheShareThatIsAskedFor) {
  const ModelShapes model = small_gpt(512, 24, 4000, DType::kBFloat16);
  MemoryPlanOptions options = in_host();
  for (const double share : {0.0, 0.1, 0.25, 0.5, 0.9, 1.0}) {
    options.cpu_share = share;
    const MemoryPlan plan = planned(model, options);
    EXPECT_NEAR(plan.cpu_share, share, share == 0 || share == 1 ? 0 : 0.02);
    EXPECT_EQ(device_updates(plan.params[large_ids(model).front()]), share < 1);
    // Nowhere more than one parameter away from it, so that neither side waits for the other.
    double cpu = 0;
    double all = 0;
    double largest = 0;
    for (const std::size_t id : large_ids(model)) {
      const auto numel = static_cast<double>(model.params[id].numel);
      all += numel;
      cpu += device_updates(plan.params[id]) ? 0 : numel;
      largest = std::max(largest, numel);
      EXPECT_LE(std::abs(cpu - share * all), largest);
    }
    EXPECT_DOUBLE_EQ(plan.cpu_share, cpu / all);
  }
  options.cpu_share = -1;
  EXPECT_NEAR(planned(model, options).cpu_share, 0.35, 0.02);
}

TEST(GpuPlan, GradientsAreAdoptedByOneRankAndWrittenOverByOneMicroBatch) {
  MemoryPlanOptions options = in_host();
  options.wire_dtype = DType::kBFloat16;
  EXPECT_TRUE(planned(large_gpt(), options).adopts_gradients);
  EXPECT_TRUE(planned(large_gpt(), options).updates_in_place);
  EXPECT_FALSE(planned(large_gpt(), options, 2).updates_in_place);
  EXPECT_EQ(planned(large_gpt(), options, 2).num_gradient_copies, 2);
  options.num_ranks = 2;
  EXPECT_FALSE(planned(large_gpt(), options).adopts_gradients);
  EXPECT_TRUE(planned(large_gpt(), options).updates_in_place);
  options.wire_dtype = DType::kFloat32;
  EXPECT_FALSE(planned(large_gpt(), options).updates_in_place) << "gradients of another type";
}

TEST(GpuPlan, GradientsOfMicroBatchesHaveRoomWhileHostMemoryAllows) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = in_host();
  options.has_nvme = true;
  const auto gradients = [](const MemoryPlan& plan) {
    return plan.bytes(Tier::kPinned, Role::kGradient);
  };
  const MemoryPlan one = planned(model, options, 1);
  const MemoryPlan four = planned(model, options, 4);
  EXPECT_EQ(four.num_gradient_copies, 4);
  EXPECT_LT(four.bytes(Tier::kDevice, Role::kGradient), one.bytes(Tier::kDevice, Role::kGradient));
  options.device_bytes = one.device_memory_bytes();
  EXPECT_LE(planned(model, options, 4).device_memory_bytes(), options.device_bytes)
      << "accumulation takes nothing of the device";
  options.device_bytes = kUnlimited;
  EXPECT_NE(four.text().find("4 copies in host memory"), std::string::npos) << four.text();
  EXPECT_FALSE(planned(model, options, 3).adds_gradients_on_host) << "the update reads as much";
  const MemoryPlan many = planned(model, options, 100);
  EXPECT_EQ(many.num_gradient_copies, 5);
  EXPECT_NE(many.text().find("all but the last added up while the last is computed"),
            std::string::npos)
      << many.text();
  // A little less than four copies need: fewer, and nothing goes to NVMe for them.
  options.host_bytes = four.host_memory_bytes() - 4096;
  const MemoryPlan least = planned(model, options, 4);
  EXPECT_EQ(least.num_gradient_copies, 3);
  EXPECT_LT(gradients(least), gradients(four));
  EXPECT_FALSE(least.uses_nvme);
  EXPECT_EQ(least.link.h2d, four.link.h2d) << "the update reads one sum, and the last";
}

TEST(GpuPlan, SlotsHoldOneSubGroupEachAndAreNoMoreThanThereAreSubGroups) {
  const std::int64_t numel = kMiB;
  const ModelShapes model =
      ModelMaker(DType::kBFloat16).unit("a", {numel + 1}).unit("b", {numel}).make();
  MemoryPlanOptions options = in_host();
  options.cpu_share = 0;
  MemoryPlan plan = planned(model, options);
  EXPECT_EQ(plan.num_update_slots, 2);
  EXPECT_EQ(plan.update_slot_bytes, (numel + 2048) * 14);
  options.sub_group_bytes = 4 * 100000;
  plan = planned(model, options);
  EXPECT_EQ(plan.sub_group_numel, 100000 / 2048 * 2048);
  EXPECT_EQ(plan.update_slot_bytes, plan.sub_group_numel * 14);
  EXPECT_EQ(plan.num_update_slots, 10);
  options.sub_group_bytes = 4 * 600000;
  EXPECT_EQ(planned(model, options).num_update_slots, 4);
  // An fp32 master has room beside its states.
  for (const Tier parameters : {Tier::kDevice, Tier::kHost}) {
    EXPECT_EQ(planned(equal_units(1, {numel}), on_gpu(parameters, Tier::kHost)).update_slot_bytes,
              numel * 12);
  }
}

TEST(GpuPlan, ArenaHoldsAllThatIsGatheredUnlessALimitIsGiven) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = in_host();
  options.live_limit_bytes = kMiB;
  const MemoryPlan whole = planned(model, options);
  std::int64_t gathered = 0;
  for (const std::size_t id : large_ids(model)) {
    gathered += 2 * model.params[id].numel;
  }
  EXPECT_GE(whole.live_limit_bytes, gathered);
  EXPECT_GE(whole.arena_bytes, gathered);
  options.is_live_limit_given = true;
  const MemoryPlan limited = planned(model, options);
  EXPECT_EQ(limited.live_limit_bytes, kMiB);
  EXPECT_LT(limited.arena_bytes, whole.arena_bytes);
  // What is freed after forward is copied again for backward.
  EXPECT_EQ(limited.link.h2d - whole.link.h2d, gathered);
}

TEST(GpuPlan, APrefetchThatIsLimitedByOptionsStaysSo) {
  MemoryPlanOptions options = in_host();
  EXPECT_GT(planned(large_gpt(), options).max_inflight, 100);
  EXPECT_EQ(planned(large_gpt(), options).reuse_distance_bytes, kUnlimited);
  options.is_max_inflight_given = true;
  options.is_reuse_distance_given = true;
  EXPECT_EQ(planned(large_gpt(), options).max_inflight, 0) << "as the options say";
  EXPECT_EQ(planned(large_gpt(), options).reuse_distance_bytes, 0);
}

TEST(GpuPlan, ASmallerDeviceHasFewerSlotsAndASmallerArena) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = in_host();
  options.sub_group_bytes = 4 * 65536;
  const MemoryPlan whole = planned(model, options);
  ASSERT_EQ(whole.num_update_slots, 10);
  // What is gathered comes before the last of the slots.
  for (int num_slots = 10; num_slots >= 6; --num_slots) {
    options.device_bytes = whole.device_memory_bytes() - (10 - num_slots) * whole.update_slot_bytes;
    const MemoryPlan fewer = planned(model, options);
    EXPECT_EQ(fewer.num_update_slots, num_slots);
    EXPECT_EQ(fewer.arena_bytes, whole.arena_bytes);
  }
  options.device_bytes -= 1;
  const MemoryPlan tight = planned(model, options);
  EXPECT_EQ(tight.num_update_slots, 6);
  EXPECT_LT(tight.arena_bytes, whole.arena_bytes);
  EXPECT_EQ(tight.live_limit_bytes, tight.arena_bytes);
  options.device_bytes =
      whole.device_memory_bytes() - whole.arena_bytes - 10 * whole.update_slot_bytes + 9 * kMiB;
  const MemoryPlan tighter = planned(model, options);
  EXPECT_LE(tighter.num_update_slots, 6);
  EXPECT_GE(tighter.num_update_slots, 2);
  EXPECT_LE(tighter.device_memory_bytes(), options.device_bytes);
}

// Parameters first, then states: each as far as the device goes.
TEST(GpuPlan, TheDeviceIsFilledInTheOrderOfUse) {
  const ModelShapes model = small_gpt(512, 12, 4000, DType::kBFloat16);
  const std::size_t num_large = large_ids(model).size();
  MemoryPlanOptions options = on_gpu();
  options.sub_group_bytes = 4 * 65536;
  const std::int64_t all = planned(model, options).device_memory_bytes();
  bool saw_some_states = false;
  bool saw_some_parameters = false;
  for (std::int64_t part = 10; part <= 100; ++part) {
    options.device_bytes = all * part / 100;
    MemoryPlan plan;
    try {
      plan = planned(model, options);
    } catch (const ConfigError&) {
      ASSERT_FALSE(saw_some_parameters || saw_some_states);
      continue;
    }
    const std::size_t parameters = num_leading(model, plan, &Placement::parameter, Tier::kDevice);
    const std::size_t states = num_leading(model, plan, &Placement::states, Tier::kDevice);
    EXPECT_TRUE(states == 0 || parameters == num_large);
    saw_some_parameters = saw_some_parameters || (parameters > 0 && parameters < num_large);
    saw_some_states = saw_some_states || (states > 0 && states < num_large);
  }
  EXPECT_TRUE(saw_some_parameters && saw_some_states);
}

TEST(GpuPlan, StatesOnNvmeStayInHostMemoryAsFarAsABudgetGoes) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kDevice, Tier::kNvme, true);
  const MemoryPlan without = planned(model, options);
  EXPECT_EQ(num_leading(model, without, &Placement::states, Tier::kNvme), large_ids(model).size());
  options.host_bytes = 120 * kMiB;
  const MemoryPlan with = planned(model, options);
  const std::size_t kept = num_leading(model, with, &Placement::states, Tier::kHost);
  EXPECT_GT(kept, 2U);
  EXPECT_LT(kept, large_ids(model).size());
  EXPECT_LE(with.host_memory_bytes(), options.host_bytes);
  EXPECT_LT(with.step.states_read, without.step.states_read);
}

TEST(GpuPlan, WhatHostMemoryIsAskedToHoldButCannotIsOnNvme) {
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost, true);
  options.host_bytes = 100 * kMiB;
  const MemoryPlan plan = planned(large_gpt(), options);
  EXPECT_GT(plan.bytes(Tier::kNvme, Role::kOptimizer), 0);
  EXPECT_EQ(plan.bytes(Tier::kNvme, Role::kShard), 0);
  options.host_bytes = 40 * kMiB;
  EXPECT_GT(planned(large_gpt(), options).bytes(Tier::kNvme, Role::kShard), 0);
}

std::int64_t num_gradients_on(const MemoryPlan& plan, Tier tier) {
  return std::count_if(plan.params.begin(), plan.params.end(),
                       [tier](const Placement& each) { return each.gradient == tier; });
}

TEST(GpuPlan, GradientsLeaveHostMemoryLastAndLeaveItNoFloorOfTwoBytesPerParameter) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const ModelShapes model = large_gpt(dtype);
    for (const int num_ranks : {1, 2}) {
      for (const std::int64_t num_micro_batches : {1, 3}) {
        SCOPED_TRACE(testing::Message()
                     << to_string(dtype) << ", " << num_ranks << " ranks, " << num_micro_batches);
        MemoryPlanOptions options = on_gpu({}, {}, true);
        options.num_ranks = num_ranks;
        options.wire_dtype = dtype;
        options.device_bytes = 24 * kMiB;
        std::int64_t last_on_nvme = 0;
        bool has_mixed = false;
        double least_per_param = 1e9;
        for (options.host_bytes = 128 * kMiB; options.host_bytes > 0;
             options.host_bytes -= options.host_bytes > 8 * kMiB ? 2 * kMiB : kMiB / 4) {
          MemoryPlan plan;
          if (!refusal_of([&] { plan = planned(model, options, num_micro_batches); }).empty()) {
            break;
          }
          EXPECT_LE(plan.host_memory_bytes(), options.host_bytes);
          const std::int64_t on_nvme = num_gradients_on(plan, Tier::kNvme);
          EXPECT_GE(on_nvme, last_on_nvme);
          last_on_nvme = on_nvme;
          has_mixed |= on_nvme > 0 && num_gradients_on(plan, Tier::kHost) > 0;
          EXPECT_EQ(plan.gradient_pool_bytes > 0, on_nvme > 0);
          EXPECT_EQ(plan.bytes(Tier::kNvme, Role::kGradient) > 0, on_nvme > 0);
          for (const Placement& each : plan.params) {
            EXPECT_TRUE(on_nvme == 0 ||
                        (each.parameter != Tier::kHost && each.states != Tier::kHost))
                << "parameters and states leave first";
            EXPECT_TRUE(each.gradient != Tier::kNvme || !device_updates(each));
          }
          least_per_param =
              static_cast<double>(plan.host_memory_bytes()) / static_cast<double>(plan.shard_numel);
        }
        EXPECT_GT(last_on_nvme, 0);
        EXPECT_TRUE(has_mixed);
        EXPECT_LT(least_per_param, 1.0);
      }
    }
  }
}

TEST(GpuPlan, GradientsOnNvmeAreCountedOnDiskAndOnTheLink) {
  const ModelShapes model = large_gpt();
  for (const std::int64_t num_micro_batches : {1, 3}) {
    MemoryPlanOptions options = on_gpu(Tier::kNvme, Tier::kNvme, true);
    options.host_bytes = 12 * kMiB;
    const MemoryPlan plan = planned(model, options, num_micro_batches);
    std::int64_t on_nvme = 0;
    std::int64_t leaving = 0;
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      const std::int64_t numel = model.params[i].numel;
      on_nvme += plan.params[i].gradient == Tier::kNvme ? rounded_up(4 * numel, 4096) : 0;
      leaving += plan.params[i].gradient == Tier::kDevice ? 0 : 2 * numel;
    }
    EXPECT_GT(on_nvme, 0);
    EXPECT_EQ(plan.bytes(Tier::kNvme, Role::kGradient), on_nvme);
    EXPECT_EQ(plan.step.gradients_written, num_micro_batches * on_nvme);
    EXPECT_EQ(plan.step.gradients_read, num_micro_batches * on_nvme);
    EXPECT_EQ(plan.link.d2h, num_micro_batches * leaving);
    std::int64_t in_extents = 0;
    for (const PlannedExtent& extent : planned_extents(model, options, plan, {"m", "v"})) {
      in_extents += extent.role == Role::kGradient ? extent.bytes : 0;
    }
    EXPECT_EQ(in_extents, on_nvme);
  }
}

struct Outcome {
  bool is_possible = false;
  std::int64_t stored = kUnlimited;
};

Outcome outcome_of(const ModelShapes& model, const MemoryPlanOptions& options) {
  MemoryPlan plan;
  try {
    plan = planned(model, options);
  } catch (const ConfigError&) {
    return {};
  }
  EXPECT_LE(plan.device_memory_bytes(), options.device_bytes);
  EXPECT_LE(plan.host_memory_bytes(), options.host_bytes);
  EXPECT_EQ(plan.uses_nvme, plan.bytes(Tier::kNvme) > 0);
  return {true, plan.bytes(Tier::kNvme)};
}

// The heart: whatever the budgets, a plan is within both or refused; a larger one stores no more,
// up to two shards, and never refuses what a smaller one allowed.
TEST(GpuPlan, SumsStayWithinBothBudgetsAndLargerOnesStoreHardlyMore) {
  constexpr std::size_t kNumBudgets = support::rounds(76U, 19U);
  const std::vector<ModelShapes> models{large_gpt(), large_gpt(DType::kFloat32),
                                        small_gpt(384, 2, 20000, DType::kBFloat16)};
  for (const ModelShapes& model : models) {
    for (const int num_ranks : {1, 2}) {
      MemoryPlanOptions options = on_gpu({}, {}, true);
      options.num_ranks = num_ranks;
      options.sub_group_bytes = 4 * 65536;
      const std::int64_t all = planned(model, options).device_memory_bytes();
      // Where parameters come to the device, states may have to leave it.
      std::int64_t two_shards = 0;
      for (const ParamShape& param : model.params) {
        two_shards = std::max(two_shards, 2 * 16 * param.numel / num_ranks);
      }
      std::vector<Outcome> before(kNumBudgets);  // with the next smaller device, by host budget
      for (const std::int64_t device_part : {5, 15, 30, 45, 60, 80, 100}) {
        options.device_bytes = all * device_part / 100;
        Outcome last;
        for (std::size_t i = 0; i < before.size(); ++i) {
          options.host_bytes = all * static_cast<std::int64_t>(1 + 152 / kNumBudgets * i) / 100;
          SCOPED_TRACE(testing::Message() << num_ranks << " ranks, " << options.device_bytes
                                          << " and " << options.host_bytes);
          const Outcome outcome = outcome_of(model, options);
          for (const Outcome& smaller : {last, before[i]}) {
            ASSERT_TRUE(outcome.is_possible || !smaller.is_possible);
            ASSERT_LE(outcome.stored, smaller.stored + (smaller.is_possible ? two_shards : 0));
          }
          last = outcome;
          before[i] = outcome;
        }
        // Where the device can hold the sums of its shards, host memory can hold all the rest; one
        // rank's may all be the CPU's.
        EXPECT_TRUE(!last.is_possible || last.stored == 0 || (num_ranks > 1 && device_part < 30));
      }
      if (num_ranks == 1) {
        EXPECT_EQ(before.front().stored, 0) << "the largest device holds everything";
      }
    }
  }
}

// Down to the largest unit and what never leaves the device.
TEST(GpuPlan, ADeviceThatCannotHoldTheGradientsOfItsShareLeavesMoreOfTheUpdateToTheCpu) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = in_host();
  options.device_bytes = kUnlimited;
  options.cpu_share = 0.25;
  const MemoryPlan wished = planned(model, options);
  EXPECT_NEAR(wished.cpu_share, 0.25, 0.1);
  options.cpu_share = 1;
  options.device_bytes = kGiB;
  const std::int64_t least = [&] {
    for (std::int64_t bytes = 64 * 1024;; bytes += 64 * 1024) {
      options.device_bytes = bytes;
      try {
        static_cast<void>(planned(model, options));
        return bytes;
      } catch (const ConfigError&) {
      }
    }
  }();
  options.cpu_share = 0.25;
  const std::int64_t all = wished.device_memory_bytes();
  MemoryPlan smaller = wished;
  for (const std::int64_t part : {100, 80, 60, 40, 20, 0}) {
    options.device_bytes = least + (all - least) * part / 100;
    const MemoryPlan plan = planned(model, options);
    EXPECT_LE(plan.device_memory_bytes(), options.device_bytes);
    EXPECT_GE(plan.cpu_share, smaller.cpu_share - 1.0 / 16);
    EXPECT_LE(plan.update_slot_bytes, smaller.update_slot_bytes);
    smaller = plan;
  }
  EXPECT_EQ(smaller.cpu_share, 1);
}

TEST(GpuPlan, TheTextTellsWhoUpdatesAndWhatTheHostHolds) {
  MemoryPlanOptions options = in_host();
  options.host_bytes = kGiB;
  const std::string text = planned(large_gpt(), options).text();
  for (const char* part : {"device", "budget", "1.00 GiB", "slots of", "on the CPU",
                           "host memory per parameter: 1", "host link per step"}) {
    EXPECT_TRUE(contains(text, part)) << part << " in\n" << text;
  }
}

TEST(GpuPlan, TheTextTellsWhereMicroBatchesAddUp) {
  const auto line = [](const MemoryPlanOptions& options, std::int64_t num_micro_batches) {
    const std::string text = planned(large_gpt(), options, num_micro_batches).text();
    const std::size_t begin = text.find("gradients of micro-batches: ");
    return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
  };
  const MemoryPlanOptions resident = on_gpu(Tier::kDevice, Tier::kDevice);
  EXPECT_EQ(line(resident, 1), "");
  EXPECT_EQ(line(resident, 4), "gradients of micro-batches: 100.0 % summed on the device, in fp32");
  EXPECT_EQ(planned(large_gpt(), resident, 4).num_gradient_copies, 0) << "none is in host memory";
  const std::string offloaded = line(in_host(), 4);
  for (const char* part : {"% summed on the device, in fp32; ",  // small parameters
                           "% 4 copies in host memory, added by the update"}) {
    EXPECT_TRUE(contains(offloaded, part)) << part << " in " << offloaded;
  }
  EXPECT_EQ(line(in_host(), 1), "");
  MemoryPlanOptions replicas = in_host();
  replicas.num_copies = 2;
  const std::string summed = line(replicas, 2);
  EXPECT_TRUE(contains(summed, "% summed in host memory, in fp32")) << summed;
  EXPECT_FALSE(contains(summed, "copies")) << summed;
}

TEST(GpuPlan, DynamicGradientsOfSeveralRanksAreOneSumHoweverOftenTheyAreListed) {
  ModelShapes model = equal_units(2, {kMiB}, DType::kBFloat16);
  model.params[1].dynamic = true;
  const auto gradients = [&](Tier tier, Tier place, double cpu_share, std::int64_t k) {
    MemoryPlanOptions options = on_gpu(place, place);
    options.num_ranks = 2;
    options.wire_dtype = DType::kBFloat16;
    options.cpu_share = cpu_share;
    const MemoryPlan plan = planned(model, options, k);
    const std::int64_t slots =
        gradient_cost(CutModel(model, options), plan.params, plan.bucket_bytes, k).bytes.slots;
    return plan.bytes(tier, Role::kGradient) - (tier == Tier::kDevice ? slots : 0);
  };
  const std::int64_t numel = kMiB / 2;
  EXPECT_EQ(gradients(Tier::kDevice, Tier::kDevice, 0, 1), numel * (2 + 4));
  EXPECT_EQ(gradients(Tier::kDevice, Tier::kDevice, 0, 3), numel * (4 + 4));
  EXPECT_EQ(gradients(Tier::kPinned, Tier::kHost, 1, 1), numel * (2 + 4 + 2));
  EXPECT_EQ(gradients(Tier::kPinned, Tier::kHost, 1, 3), numel * (3 * 2 + 4 + 2));
}

// Copies of the model send as ranks of one do.
TEST(GpuPlan, ALargerDeviceNeverRefusesWhatASmallerOneAllowedAlsoForCopies) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = in_host();
  options.num_copies = 2;
  options.call_memory = comm::CallMemory::kCopied;
  options.cpu_share = 1;
  const std::int64_t all = planned(model, options).device_memory_bytes();
  for (const std::int64_t part : {30, 50, 80}) {
    options.device_bytes = all * part / 100;
    options.host_bytes = kUnlimited;
    options.host_bytes = planned(model, options).host_memory_bytes();
    for (const std::int64_t larger : {100, 200, 800}) {
      options.device_bytes = all * larger / 100;
      EXPECT_NO_THROW(planned(model, options)) << part << " %, then " << larger;
    }
  }
}

TEST(GpuPlan, AParameterIsSmallUpToWhatStaysGathered) {
  ModelShapes model = equal_units(2, {4096}, DType::kBFloat16);
  MemoryPlanOptions options = in_host();
  EXPECT_EQ(planned(model, options).params.front().parameter, Tier::kDevice);
  options.small_param_bytes = 4096;
  EXPECT_EQ(planned(model, options).params.front().parameter, Tier::kHost);
}

}  // namespace
}  // namespace tessera::planner
