// Plans for a device with memory of its own: what lives where, who updates it, and how budgets
// decide.
#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/units.h"
#include "tessera/shard/layout.h"
#include "tests/planner/plan_cases.h"
#include "tests/support/sizes.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

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
std::size_t num_leading(const ModelShapes& model, const MemoryPlan& placement,
                        Tier Placement::*role, Tier place) {
  std::size_t count = 0;
  bool has_ended = false;
  for (const std::size_t id : large_ids(model)) {
    const bool is_there = placement.params[id].*role == place;
    EXPECT_FALSE(is_there && has_ended) << model.params[id].name;
    has_ended = has_ended || !is_there;
    count += is_there ? 1 : 0;
  }
  return count;
}

TEST(CudaPlacement, KeepsEverythingOnTheDeviceWithoutABudget) {
  for (const ModelShapes& model : small_models()) {
    const MemoryPlan placement = plan_memory(model, on_gpu(), 1);
    for (const Placement& each : placement.params) {
      EXPECT_EQ(each, (Placement{Tier::kDevice, Tier::kDevice, Tier::kDevice, Updater::kDevice}));
    }
    EXPECT_EQ(placement.host_memory_bytes(), 0);
    EXPECT_EQ(placement.link.h2d + placement.link.d2h, 0);
    EXPECT_EQ(placement.arena_bytes, 0);
    EXPECT_EQ(placement.num_update_slots, 0);
    EXPECT_EQ(placement.cpu_share, 0);
  }
}

TEST(CudaPlacement, SmallParametersAreOnTheDeviceWhateverIsWished) {
  const ModelShapes model = large_gpt();
  for (const Tier wish : {Tier::kHost, Tier::kNvme}) {
    const MemoryPlan placement = plan_memory(model, on_gpu(wish, wish, true), 1);
    const Tier place = wish == Tier::kHost ? Tier::kHost : Tier::kNvme;
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      const Placement& each = placement.params[i];
      EXPECT_EQ(each.parameter, is_small(model, i) ? Tier::kDevice : place);
      EXPECT_EQ(each.states, is_small(model, i) ? Tier::kDevice : place);
      EXPECT_TRUE(device_updates(each) || !is_small(model, i));
    }
  }
}

TEST(CudaPlacement, GradientsAreWhereTheUpdateIsAndNeverOnNvme) {
  const ModelShapes model = large_gpt();
  for (const Tier parameters : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    for (const Tier optimizer : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      const MemoryPlan placement = plan_memory(model, on_gpu(parameters, optimizer, true), 1);
      for (const Placement& each : placement.params) {
        EXPECT_EQ(each.gradient, device_updates(each) ? Tier::kDevice : Tier::kHost);
        EXPECT_TRUE(each.states != Tier::kDevice || device_updates(each));
        EXPECT_TRUE(each.states != Tier::kNvme || !device_updates(each));
      }
    }
  }
}

// What the disk gets leaves from host memory.
TEST(CudaPlacement, TheProcessorUpdatesWhatIsOnNvme) {
  const ModelShapes model = large_gpt();
  const MemoryPlan placement = plan_memory(model, on_gpu(Tier::kNvme, Tier::kHost, true), 1);
  for (const std::size_t id : large_ids(model)) {
    EXPECT_EQ(placement.params[id].states, Tier::kHost);
    EXPECT_FALSE(device_updates(placement.params[id]));
  }
  EXPECT_EQ(placement.cpu_share, 1);
  EXPECT_EQ(placement.num_update_slots, 0);
}

TEST(CudaPlacement, TheProcessorGetsTheShareThatIsAskedFor) {
  const ModelShapes model = small_gpt(512, 24, 4000, DType::kBFloat16);
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  for (const double share : {0.0, 0.1, 0.25, 0.5, 0.9, 1.0}) {
    options.cpu_share = share;
    const MemoryPlan placement = plan_memory(model, options, 1);
    EXPECT_NEAR(placement.cpu_share, share, share == 0 || share == 1 ? 0 : 0.02);
    EXPECT_EQ(device_updates(placement.params[large_ids(model).front()]), share < 1);
    // Nowhere more than one parameter away from it, so that neither side waits for the other.
    double processor = 0;
    double all = 0;
    double largest = 0;
    for (const std::size_t id : large_ids(model)) {
      const auto numel = static_cast<double>(model.params[id].numel);
      all += numel;
      processor += device_updates(placement.params[id]) ? 0 : numel;
      largest = std::max(largest, numel);
      EXPECT_LE(std::abs(processor - share * all), largest);
    }
    EXPECT_DOUBLE_EQ(placement.cpu_share, processor / all);
  }
  options.cpu_share = -1;
  EXPECT_NEAR(plan_memory(model, options, 1).cpu_share, 0.35, 0.02);
}

TEST(CudaPlacement, ThePlanIsTheSameEveryTime) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(std::nullopt, std::nullopt, true);
  options.device_bytes = 60 * kMiB;
  options.host_bytes = 60 * kMiB;
  const MemoryPlan first = plan_memory(model, options, 1);
  const MemoryPlan second = plan_memory(model, options, 1);
  EXPECT_EQ(first.params, second.params);
  EXPECT_EQ(first.text(), second.text());
}

TEST(CudaPlacement, GradientsLeaveEarlyOnlyAloneAndWithOneMicroBatch) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  EXPECT_TRUE(plan_memory(model, options, 1).gradients_leave_early);
  EXPECT_FALSE(plan_memory(model, options, 2).gradients_leave_early);
  options.num_ranks = 2;
  EXPECT_FALSE(plan_memory(model, options, 1).gradients_leave_early);
}

TEST(CudaPlacement, SlotsHoldOneSubGroupEachAndAreNoMoreThanThereAreSubGroups) {
  const std::int64_t numel = std::int64_t{1} << 20;
  ModelMaker maker(DType::kBFloat16);
  maker.unit("a", {numel + 1}).unit("b", {numel});
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.cpu_share = 0;
  MemoryPlan placement = plan_memory(maker.make(), options, 1);
  EXPECT_EQ(placement.num_update_slots, 2);
  EXPECT_EQ(placement.update_slot_bytes, (numel + 2048) * 14);
  options.sub_group_bytes = 4 * 100000;
  placement = plan_memory(maker.make(), options, 1);
  EXPECT_EQ(placement.sub_group_numel, 100000 / 2048 * 2048);
  EXPECT_EQ(placement.update_slot_bytes, placement.sub_group_numel * 14);
  EXPECT_EQ(placement.num_update_slots, 10);
  options.sub_group_bytes = 4 * 600000;
  EXPECT_EQ(plan_memory(maker.make(), options, 1).num_update_slots, 4);
}

TEST(CudaPlacement, AnFp32MasterHasRoomInTheSlotBesideItsStates) {
  const std::int64_t numel = std::int64_t{1} << 20;
  const ModelShapes model = ModelMaker().unit("a", {numel}).make();
  for (const Tier parameters : {Tier::kDevice, Tier::kHost}) {
    const MemoryPlan placement = plan_memory(model, on_gpu(parameters, Tier::kHost), 1);
    EXPECT_EQ(placement.update_slot_bytes, numel * 12);
  }
}

TEST(CudaPlacement, ArenaHoldsAllThatIsGatheredUnlessALimitIsGiven) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.live_limit_bytes = kMiB;
  const MemoryPlan whole = plan_memory(model, options, 1);
  std::int64_t gathered = 0;
  for (const std::size_t id : large_ids(model)) {
    gathered += 2 * model.params[id].numel;
  }
  EXPECT_GE(whole.live_limit_bytes, gathered);
  EXPECT_GE(whole.arena_bytes, gathered);
  options.is_live_limit_given = true;
  const MemoryPlan limited = plan_memory(model, options, 1);
  EXPECT_EQ(limited.live_limit_bytes, kMiB);
  EXPECT_LT(limited.arena_bytes, whole.arena_bytes);
  // What is let go of after forward comes up again for backward.
  EXPECT_EQ(limited.link.h2d - whole.link.h2d, gathered);
}

TEST(CudaPlacement, ASmallerDeviceHasFewerSlotsAndASmallerArena) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.sub_group_bytes = 4 * 65536;
  const MemoryPlan whole = plan_memory(model, options, 1);
  ASSERT_EQ(whole.num_update_slots, 10);
  options.device_bytes = whole.device_memory_bytes();
  EXPECT_EQ(plan_memory(model, options, 1).arena_bytes, whole.arena_bytes);
  // What is gathered comes before the last of the slots.
  for (int num_slots = 9; num_slots >= 6; --num_slots) {
    options.device_bytes = whole.device_memory_bytes() -
                           (10 - num_slots) * static_cast<std::int64_t>(whole.update_slot_bytes);
    const MemoryPlan fewer = plan_memory(model, options, 1);
    EXPECT_EQ(fewer.num_update_slots, num_slots);
    EXPECT_EQ(fewer.arena_bytes, whole.arena_bytes);
  }
  options.device_bytes -= 1;
  const MemoryPlan tight = plan_memory(model, options, 1);
  EXPECT_EQ(tight.num_update_slots, 6);
  EXPECT_LT(tight.arena_bytes, whole.arena_bytes);
  EXPECT_EQ(tight.live_limit_bytes, tight.arena_bytes);
  options.device_bytes =
      whole.device_memory_bytes() - whole.arena_bytes - 10 * whole.update_slot_bytes + 9 * kMiB;
  const MemoryPlan tighter = plan_memory(model, options, 1);
  EXPECT_LE(tighter.num_update_slots, 6);
  EXPECT_GE(tighter.num_update_slots, 2);
  EXPECT_LE(tighter.device_memory_bytes(), options.device_bytes);
}

// Parameters first, then states: each as far as the device goes.
TEST(CudaPlacement, TheDeviceIsFilledInTheOrderOfUse) {
  const ModelShapes model = small_gpt(512, 12, 4000, DType::kBFloat16);
  const std::size_t num_large = large_ids(model).size();
  MemoryPlanOptions options = on_gpu();
  options.sub_group_bytes = 4 * 65536;
  const std::int64_t all = plan_memory(model, options, 1).device_memory_bytes();
  bool saw_some_states = false;
  bool saw_some_parameters = false;
  for (std::int64_t part = 10; part <= 100; ++part) {
    options.device_bytes = all * part / 100;
    MemoryPlan placement;
    try {
      placement = plan_memory(model, options, 1);
    } catch (const ConfigError&) {
      ASSERT_FALSE(saw_some_parameters || saw_some_states);
      continue;
    }
    const std::size_t parameters =
        num_leading(model, placement, &Placement::parameter, Tier::kDevice);
    const std::size_t states = num_leading(model, placement, &Placement::states, Tier::kDevice);
    EXPECT_TRUE(states == 0 || parameters == num_large);
    saw_some_parameters = saw_some_parameters || (parameters > 0 && parameters < num_large);
    saw_some_states = saw_some_states || (states > 0 && states < num_large);
  }
  EXPECT_TRUE(saw_some_parameters && saw_some_states);
}

TEST(CudaPlacement, StatesOnNvmeStayInHostMemoryAsFarAsABudgetGoes) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kDevice, Tier::kNvme, true);
  const MemoryPlan without = plan_memory(model, options, 1);
  EXPECT_EQ(num_leading(model, without, &Placement::states, Tier::kNvme), large_ids(model).size());
  options.host_bytes = 120 * kMiB;
  const MemoryPlan with = plan_memory(model, options, 1);
  const std::size_t kept = num_leading(model, with, &Placement::states, Tier::kHost);
  EXPECT_GT(kept, 2U);
  EXPECT_LT(kept, large_ids(model).size());
  EXPECT_LE(with.host_memory_bytes(), options.host_bytes);
  EXPECT_LT(with.step.states_read, without.step.states_read);
}

TEST(CudaPlacement, WhatHostMemoryIsWishedToHoldButCannotIsOnNvme) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost, true);
  options.host_bytes = 100 * kMiB;
  const MemoryPlan placement = plan_memory(model, options, 1);
  EXPECT_GT(placement.bytes(Tier::kNvme, Role::kOptimizer), 0);
  EXPECT_EQ(placement.bytes(Tier::kNvme, Role::kShard), 0);
  options.host_bytes = 40 * kMiB;
  EXPECT_GT(plan_memory(model, options, 1).bytes(Tier::kNvme, Role::kShard), 0);
}

struct Outcome {
  bool is_possible = false;
  std::int64_t stored = kUnlimited;
};

Outcome outcome_of(const ModelShapes& model, const MemoryPlanOptions& options) {
  MemoryPlan placement;
  try {
    placement = plan_memory(model, options, 1);
  } catch (const ConfigError&) {
    return {};
  }
  EXPECT_LE(placement.device_memory_bytes(), options.device_bytes);
  EXPECT_LE(placement.host_memory_bytes(), options.host_bytes);
  EXPECT_EQ(placement.uses_nvme, placement.bytes(Tier::kNvme) > 0);
  return {true, placement.bytes(Tier::kNvme)};
}

// The heart: whatever the budgets, a plan is within both or refused; a larger one stores no more,
// up to two shards, and never refuses what a smaller one allowed.
TEST(CudaPlacement, SumsStayWithinBothBudgetsAndLargerOnesStoreHardlyMore) {
  constexpr std::size_t kNumBudgets = support::rounds(76U, 19U);
  const std::vector<ModelShapes> models{large_gpt(), large_gpt(DType::kFloat32),
                                        small_gpt(384, 2, 20000, DType::kBFloat16)};
  for (const ModelShapes& model : models) {
    for (const int num_ranks : {1, 2}) {
      MemoryPlanOptions options = on_gpu(std::nullopt, std::nullopt, true);
      options.num_ranks = num_ranks;
      options.sub_group_bytes = 4 * 65536;
      const std::int64_t all = plan_memory(model, options, 1).device_memory_bytes();
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
        // Where the device can hold the gradients of its share, host memory can hold all the rest.
        EXPECT_TRUE(last.stored == 0 || device_part < 30);
      }
      if (num_ranks == 1) {
        EXPECT_EQ(before.front().stored, 0) << "the largest device holds everything";
      }
    }
  }
}

TEST(CudaPlacement, OptionsOfARunReachThePlan) {
  Config config;
  EXPECT_LT(MemoryPlanOptions::from(config, 1, true).cpu_share, 0);
  EXPECT_FALSE(MemoryPlanOptions::from(config, 1, true).is_live_limit_given);
  config.set("optim.cpu_share", 0.25);
  config.set("live.limit_bytes", "1GiB");
  const MemoryPlanOptions options = MemoryPlanOptions::from(config, 1, true);
  EXPECT_EQ(options.cpu_share, 0.25);
  EXPECT_TRUE(options.is_live_limit_given);
}

TEST(CudaPlacement, TheTextTellsWhoUpdatesAndWhatTheHostHolds) {
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.host_bytes = std::int64_t{1} << 30;
  const std::string text = plan_memory(large_gpt(), options, 1).text();
  for (const char* part : {"device", "budget", "1.00 GiB", "slots of", "on the CPU",
                           "host memory per parameter: 1", "host link per step"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(CudaPlacement, CountsWhatForwardIsHandedByTheUpdate) {
  ModelShapes model = large_gpt();
  const MemoryPlanOptions options = on_gpu(Tier::kNvme, Tier::kNvme, true);
  const MemoryPlan placement = plan_memory(model, options, 1);
  const std::int64_t stored = placement.bytes(Tier::kNvme, Role::kShard);
  EXPECT_GT(stored, 0);
  EXPECT_EQ(placement.step.parameters_read, stored) << "they stay until backward";
  EXPECT_EQ(placement.step.parameters_from_update, stored);
  const auto largest =
      std::max_element(model.params.begin(), model.params.end(),
                       [](const auto& a, const auto& b) { return a.numel < b.numel; });
  largest->trainable = false;
  EXPECT_LT(plan_memory(model, options, 1).step.parameters_from_update, stored)
      << "nobody hands over what is frozen";
  MemoryPlanOptions narrow = options;
  narrow.parameter_buffers = 1;
  narrow.parameter_buffer_bytes = 64 << 10;
  EXPECT_EQ(plan_memory(model, narrow, 1).step.parameters_from_update, 0)
      << "they do not fit into the window";
}

}  // namespace
}  // namespace tessera::planner
