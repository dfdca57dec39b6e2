// Secondary shards in the plan: where they live, to the byte, and what a step reads beside them.
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/device/host_memory.h"
#include "tessera/planner/memory_cost.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

MemoryPlanOptions with_second(MemoryPlanOptions options, int num_ranks, int second) {
  options.num_ranks = num_ranks;
  options.num_secondary_ranks = second;
  return options;
}

struct Pieces {
  std::int64_t on_device = 0;
  std::int64_t in_host = 0;  // as they are charged
  std::int64_t host_shards = 0;
  std::size_t num_in_host = 0;
};

Pieces pieces_of(const ModelShapes& model, const MemoryPlan& plan, int num_ranks, int second) {
  Pieces pieces;
  const auto page = as_int(device::page_bytes());
  for (std::size_t id = 0; id < model.params.size(); ++id) {
    const shard::Layout layout(model.params[id].numel, num_ranks, model.dtype);
    const std::int64_t bytes = as_int(layout.full_bytes()) / second;
    const bool is_in_host = plan.params[id].secondary == Tier::kHost;
    (is_in_host ? pieces.in_host : pieces.on_device) +=
        is_in_host ? rounded_up(bytes, page) : bytes;
    pieces.num_in_host += is_in_host ? 1 : 0;
    pieces.host_shards += plan.params[id].parameter == Tier::kHost
                              ? rounded_up(as_int(layout.shard_bytes()), page)
                              : 0;
  }
  return pieces;
}

TEST(SecondaryPlan, IsOnTheDeviceAsFarAsItGoesAndThenInPinnedHostMemoryInTheOrderOfUse) {
  const ModelShapes model = large_gpt();
  for (const int second : {2, 4}) {
    MemoryPlanOptions options = with_second(in_host(), 4, second);
    const MemoryPlan all = planned(model, options);
    EXPECT_EQ(pieces_of(model, all, 4, second).num_in_host, 0U);
    std::size_t num_in_host = 0;
    bool had_some_of_each = false;
    for (std::int64_t part = 100; part > 0; part -= 2) {
      options.device_bytes = all.device_memory_bytes() * part / 100;
      SCOPED_TRACE(testing::Message()
                   << "secondary shards over " << second << " within " << options.device_bytes);
      if (!refusal_of(model, options).empty()) {
        break;
      }
      const MemoryPlan plan = planned(model, options);
      const Pieces pieces = pieces_of(model, plan, 4, second);
      EXPECT_LE(plan.device_memory_bytes(), options.device_bytes);
      EXPECT_EQ(plan.bytes(Tier::kPinned, Role::kShard), pieces.in_host + pieces.host_shards);
      EXPECT_EQ(plan.secondary_host_bytes, pieces.in_host);
      EXPECT_EQ(plan.secondary_device_bytes, pieces.on_device);
      EXPECT_TRUE(contains(plan.text(), "secondary shards (hpZ)"));
      EXPECT_GE(pieces.num_in_host, num_in_host) << "a smaller device holds no more";
      num_in_host = pieces.num_in_host;
      bool has_ended = false;
      for (std::size_t id = 0; id < model.params.size(); ++id) {
        if (is_small(model, id)) {
          EXPECT_EQ(plan.params[id].secondary, Tier::kDevice) << model.params[id].name;
        } else {
          EXPECT_FALSE(has_ended && plan.params[id].secondary == Tier::kDevice);
          has_ended = has_ended || plan.params[id].secondary == Tier::kHost;
        }
      }
      had_some_of_each =
          had_some_of_each || (has_ended && plan.params[0].secondary == Tier::kDevice);
    }
    EXPECT_GT(num_in_host, 0U);
    EXPECT_TRUE(had_some_of_each);
  }
}

// Written once, behind the first gather, and copied to the device for every other one.
TEST(SecondaryPlan, CrossesTheLinkOncePerGatherBehindTheFirst) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options = with_second(on_gpu(Tier::kDevice, Tier::kDevice), 4, 2);
  options.live_limit_bytes = kMiB;
  options.is_live_limit_given = true;
  constexpr std::int64_t kMicroBatches = 3;
  const MemoryPlan on_device = planned(model, options, kMicroBatches);
  const std::int64_t all = on_device.device_memory_bytes();
  std::size_t most_in_host = 0;
  for (std::int64_t part = 100; part > 50; part -= 2) {
    options.device_bytes = all * part / 100;
    if (!refusal_of([&] { planned(model, options, kMicroBatches); }).empty()) {
      break;
    }
    const MemoryPlan plan = planned(model, options, kMicroBatches);
    std::int64_t in_host = 0;
    for (std::size_t id = 0; id < model.params.size(); ++id) {
      const shard::Layout layout(model.params[id].numel, 4, model.dtype);
      in_host += plan.params[id].secondary == Tier::kHost ? as_int(layout.full_bytes()) / 2 : 0;
    }
    EXPECT_EQ(plan.link.d2h - on_device.link.d2h, in_host);
    EXPECT_EQ(plan.link.h2d - on_device.link.h2d, (2 * kMicroBatches - 1) * in_host);
    most_in_host = std::max(most_in_host, pieces_of(model, plan, 4, 2).num_in_host);
  }
  EXPECT_GT(most_in_host, 0U);
}

// Shards that travel as wires: stored as blocks, or quantised for gathers.
MemoryPlanOptions with_wires(MemoryPlanOptions options, bool is_stored) {
  Config config;
  config.set("quant.frozen_bits", std::int64_t{4});
  options.weight_bits = is_stored ? 0 : 8;
  options.stored = is_stored ? shard::StoredRule::from(config) : shard::StoredRule();
  return options;
}

// A model whose matrices are frozen.
ModelShapes frozen_gpt() {
  ModelShapes model = large_gpt();
  for (ParamShape& param : model.params) {
    param.trainable = param.numel < 8192;
    param.num_dims = param.trainable ? 1 : 2;
  }
  return model;
}

TEST(SecondaryPlan, IsOfWiresWhereShardsTravelAsWires) {
  const ModelShapes model = frozen_gpt();
  constexpr int kRanks = 4;
  for (const bool is_stored : {true, false}) {
    for (const int second : {2, 4}) {
      MemoryPlanOptions options = with_wires(on_gpu(Tier::kDevice, Tier::kDevice), is_stored);
      options.num_ranks = kRanks;
      options.live_limit_bytes = kMiB;
      options.is_live_limit_given = true;
      const MemoryPlan plain = planned(model, options);
      const MemoryPlan on_device = planned(model, with_second(options, kRanks, second));
      std::vector<std::int64_t> pieces;
      std::int64_t all = 0;
      for (const ParamShape& param : model.params) {
        const bool is_block = is_stored && !param.trainable;
        const std::int64_t share = (param.numel + kRanks - 1) / kRanks;
        const std::int64_t numel = is_block ? rounded_up(share, 1024) : rounded_up(share, 8);
        const std::int64_t codes = is_block ? numel / 2 : rounded_up(numel, 16);
        const std::int64_t scales = rounded_up((numel + 127) / 128 * 2, 16);
        pieces.push_back((is_stored && !is_block ? 2 * numel : codes + scales) * kRanks / second);
        all += pieces.back();
      }
      EXPECT_EQ(on_device.secondary_device_bytes, all);
      EXPECT_EQ(on_device.bytes(Tier::kDevice, Role::kShard),
                plain.bytes(Tier::kDevice, Role::kShard) + all);
      options = with_second(options, kRanks, second);
      std::size_t most_in_host = 0;
      bool was_refused = false;
      for (std::int64_t part = 99; part > 50; part -= 2) {
        options.device_bytes = on_device.device_memory_bytes() * part / 100;
        if (!refusal_of(model, options).empty()) {
          was_refused = true;
          continue;
        }
        EXPECT_FALSE(was_refused) << "a larger device was refused";
        const MemoryPlan plan = planned(model, options);
        EXPECT_LE(plan.device_memory_bytes(), options.device_bytes);
        std::int64_t in_host = 0;
        std::size_t num_in_host = 0;
        for (std::size_t id = 0; id < model.params.size(); ++id) {
          const bool is_there = plan.params[id].secondary == Tier::kHost;
          in_host += is_there ? pieces[id] : 0;
          num_in_host += is_there ? 1 : 0;
        }
        EXPECT_EQ(plan.link.d2h - on_device.link.d2h, in_host);
        EXPECT_EQ(plan.link.h2d - on_device.link.h2d, in_host) << "one of two gathers";
        EXPECT_GE(num_in_host, most_in_host) << "a smaller device holds no more";
        most_in_host = num_in_host;
      }
      EXPECT_GT(most_in_host, 0U);
    }
  }
}

TEST(SecondaryPlan, OfParametersOnNvmeTakesMemoryAndLetsAStepReadThemOnce) {
  const ModelShapes model = small_gpt(64, 2, 3000);
  for (const bool is_discrete : {false, true}) {
    MemoryPlanOptions options = with_budget(kUnlimited, 4);
    options.is_discrete = is_discrete;
    options.parameters = Tier::kNvme;
    options.parameters_host_bytes = 0;
    options.live_limit_bytes = kMiB / 4;
    options.is_live_limit_given = true;
    const MemoryPlan plain = planned(model, options, 3);
    const MemoryPlan plan = planned(model, with_second(options, 4, 2), 3);
    EXPECT_EQ(plain.step.parameters_read, 6 * plan.step.parameters_read);
    EXPECT_GT(plan.step.parameters_read, 0);
    std::int64_t pieces = 0;
    for (const ParamShape& param : model.params) {
      const shard::Layout layout(param.numel, 4, model.dtype);
      const std::int64_t bytes = as_int(layout.full_bytes()) / 2;
      pieces += is_discrete ? bytes : taken_bytes(bytes);
    }
    EXPECT_EQ(plan.bytes(Tier::kDevice, Role::kShard) - plain.bytes(Tier::kDevice, Role::kShard),
              pieces);
  }
}

TEST(SecondaryPlan, StaysWithinEveryBudgetAndALargerOneIsNeverRefused) {
  for (const ModelShapes& model : small_models()) {
    const MemoryPlanOptions options = with_second(with_budget(kUnlimited), 2, 2);
    const std::int64_t all = planned(model, options).memory_bytes() + 2 * kMiB;
    bool was_possible = false;
    for (std::int64_t part = 1; part <= 100; ++part) {
      MemoryPlanOptions within = options;
      within.host_bytes = all * part / 100;
      const std::string refusal = refusal_of(model, within);
      ASSERT_TRUE(refusal.empty() || !was_possible) << refusal;
      was_possible = was_possible || refusal.empty();
      if (refusal.empty()) {
        ASSERT_LE(planned(model, within).memory_bytes(), within.host_bytes);
      }
    }
    EXPECT_TRUE(was_possible);
  }
  for (const int wires : {0, 1, 2}) {
    const ModelShapes model = wires == 1 ? frozen_gpt() : large_gpt();
    MemoryPlanOptions gpu = with_second(on_gpu({}, {}, true), 2, 2);
    gpu = wires > 0 ? with_wires(gpu, wires == 1) : gpu;
    const std::int64_t all = planned(model, gpu).device_memory_bytes();
    std::set<std::int64_t> possible;  // host parts
    for (const std::int64_t device_part : {5, 15, 30, 45, 60, 80, 100}) {
      gpu.device_bytes = all * device_part / 100;
      for (std::int64_t host_part = 2; host_part <= 150; host_part += 4) {
        gpu.host_bytes = all * host_part / 100;
        const std::string refusal = refusal_of(model, gpu);
        ASSERT_TRUE(refusal.empty() || !possible.contains(host_part))
            << device_part << " % and " << host_part << " %: " << refusal;
        if (refusal.empty()) {
          const MemoryPlan plan = planned(model, gpu);
          ASSERT_LE(plan.device_memory_bytes(), gpu.device_bytes);
          ASSERT_LE(plan.host_memory_bytes(), gpu.host_bytes);
          for (std::int64_t more = host_part; more <= 150; more += 4) {
            possible.insert(more);
          }
        }
      }
    }
    EXPECT_FALSE(possible.empty());
  }
}

// What gathers send encoded lies on the device, and shards elsewhere are loaded for it once.
TEST(EncodedPlan, IsCountedOnTheDeviceAndInEveryBudget) {
  const ModelShapes model = large_gpt();
  for (const bool is_discrete : {false, true}) {
    MemoryPlanOptions options = is_discrete ? in_host() : MemoryPlanOptions();
    options.num_ranks = 4;
    options.live_limit_bytes = kMiB;
    options.is_live_limit_given = true;
    const MemoryPlan plain = planned(model, options, 2);
    options.weight_bits = 8;
    const MemoryPlan plan = planned(model, options, 2);
    std::int64_t encoded = 0;
    std::int64_t in_host = 0;
    for (std::size_t id = 0; id < model.params.size(); ++id) {
      const shard::Layout layout(model.params[id].numel, 4, model.dtype);
      const std::int64_t blocks = (layout.shard_numel() + 127) / 128;
      const std::int64_t bytes = rounded_up(layout.shard_numel(), 16) + rounded_up(2 * blocks, 16);
      encoded += is_discrete ? bytes : taken_bytes(bytes);
      in_host += plan.params[id].parameter == Tier::kHost ? as_int(layout.shard_bytes()) : 0;
    }
    EXPECT_EQ(plan.encoded_bytes, encoded);
    EXPECT_EQ(plan.bytes(Tier::kDevice, Role::kShard) - plain.bytes(Tier::kDevice, Role::kShard),
              encoded);
    EXPECT_EQ(plan.bytes(Tier::kDevice, Role::kOther), 16 * as_int(model.params.size()));
    EXPECT_EQ(plain.link.h2d - plan.link.h2d, 3 * in_host) << "once for four gathers";
    EXPECT_TRUE(contains(plan.text(), "encoded for gathers (qwZ)"));

    const auto budget =
        is_discrete ? &MemoryPlanOptions::device_bytes : &MemoryPlanOptions::host_bytes;
    options.*budget = kMiB;
    const std::string text = refusal_of(model, options);
    EXPECT_TRUE(contains(text, "encoded shards")) << text;
    options.*budget = advised_bytes(text);
    EXPECT_EQ(refusal_of(model, options), "");
    --(options.*budget);
    EXPECT_NE(refusal_of(model, options), "");
  }
}

TEST(SecondaryPlan, IsPartOfTheSumOfARefusalWhoseRemedyWorks) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions cpu = with_second({}, 2, 2);
  cpu.host_bytes = kMiB;
  std::string text = refusal_of(model, cpu);
  EXPECT_TRUE(contains(text, "secondary shards")) << text;
  cpu.host_bytes = advised_bytes(text);
  EXPECT_EQ(refusal_of(model, cpu), "");
  --cpu.host_bytes;
  EXPECT_NE(refusal_of(model, cpu), "");

  MemoryPlanOptions gpu = with_second(in_host(), 2, 2);
  gpu.device_bytes = 24 * kMiB;
  gpu.host_bytes = kMiB;
  text = refusal_of(model, gpu);
  EXPECT_TRUE(contains(text, "secondary shards")) << text;
  gpu.host_bytes = advised_bytes(text);
  EXPECT_EQ(refusal_of(model, gpu), "");
  --gpu.host_bytes;
  EXPECT_NE(refusal_of(model, gpu), "");
}

}  // namespace
}  // namespace tessera::planner
