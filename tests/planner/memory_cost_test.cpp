// What a plan says will be charged is, line by line, the sum over parameters; and what it says that
// a step moves is what moves.
#include "tessera/planner/memory_cost.h"

#include <algorithm>
#include <map>
#include <utility>

#include <gtest/gtest.h>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/device/host_memory.h"
#include "tessera/tier/io_engine.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

using LineSums = std::map<std::pair<Tier, Role>, std::int64_t>;

std::int64_t pages(std::int64_t bytes) {
  return rounded_up(bytes, static_cast<std::int64_t>(device::page_bytes()));
}
std::int64_t blocks(std::int64_t bytes) { return rounded_up(bytes, 4096); }

// As the rules say, of one rank on a GPU.
LineSums expected_lines(const ModelShapes& model, const MemoryPlan& plan, int num_tensors) {
  LineSums sums;
  const auto element = static_cast<std::int64_t>(bytes_of(model.dtype));
  const std::int64_t copies = plan.num_gradient_copies;
  const std::int64_t gradient = plan.updates_in_place || plan.adopts_gradients ? element : 4;
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const Placement& each = plan.params[i];
    const shard::Layout layout(model.params[i].numel, 1, model.dtype);
    const std::int64_t shard = layout.shard_numel() * element;
    const std::int64_t states = num_tensors * blocks(4 * layout.shard_numel());
    if (each.parameter == Tier::kDevice) {
      sums[{Tier::kDevice, Role::kShard}] += shard;
    } else if (each.parameter == Tier::kHost) {
      sums[{Tier::kPinned, Role::kShard}] += pages(shard);
    } else {
      sums[{Tier::kNvme, Role::kShard}] += blocks(shard);
    }
    if (!model.params[i].trainable) {
      continue;
    }
    if (each.gradient == Tier::kDevice) {
      sums[{Tier::kDevice, Role::kGradient}] += layout.numel() * gradient;
    } else {
      sums[{Tier::kPinned, Role::kGradient}] += copies * pages(layout.shard_numel() * element);
    }
    if (!device_updates(each) && each.parameter == Tier::kDevice) {
      sums[{Tier::kPinned, Role::kStaging}] += pages(shard);
    }
    if (each.states == Tier::kDevice) {
      sums[{Tier::kDevice, Role::kOptimizer}] += states;
    } else if (each.states == Tier::kNvme) {
      sums[{Tier::kNvme, Role::kOptimizer}] += states;
    } else if (device_updates(each)) {
      sums[{Tier::kPinned, Role::kOptimizer}] += pages(states);
    } else {
      const bool has_pages = states >= static_cast<std::int64_t>(device::kPagesFromBytes);
      sums[{Tier::kHost, Role::kOptimizer}] += has_pages ? pages(states) : states;
    }
  }
  sums[{Tier::kDevice, Role::kFull}] += plan.arena_bytes;
  sums[{Tier::kDevice, Role::kStaging}] += plan.num_update_slots * plan.update_slot_bytes;
  if (plan.uses_nvme) {
    const coordinator::LoaderSizes feed =
        coordinator::loader_sizes(static_cast<std::size_t>(plan.parameter_pool_bytes));
    sums[{Tier::kPinned, Role::kStaging}] += pages(plan.optimizer_pool_bytes) +
                                             pages(blocks(as_int(2 * feed.tile_bytes))) +
                                             pages(blocks(as_int(feed.window_bytes)));
  }
  return sums;
}

TEST(GpuCost, EveryLineIsTheSumOverParameters) {
  using Wishes = std::vector<std::optional<Tier>>;
  std::vector<ModelShapes> models = small_models();
  models.push_back(large_gpt());
  models.push_back(large_gpt(DType::kFloat32));
  for (const ModelShapes& model : models) {
    for (const auto parameters : Wishes{{}, Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      for (const auto optimizer : Wishes{{}, Tier::kHost, Tier::kNvme}) {
        for (const std::int64_t num_micro_batches : {1, 3, 20}) {
          const MemoryPlan plan =
              planned(model, on_gpu(parameters, optimizer, true), num_micro_batches);
          LineSums sums = expected_lines(model, plan, model.dtype == DType::kFloat32 ? 2 : 3);
          std::int64_t all = 0;
          for (const LedgerLine& line : plan.ledger) {
            EXPECT_EQ(line.bytes, (sums[{line.tier, line.role}]))
                << to_string(line.tier) << " " << to_string(line.role);
            all += line.bytes;
          }
          for (const auto& [cell, bytes] : sums) {
            all -= bytes;
          }
          EXPECT_EQ(all, 0) << "a line is missing";
        }
      }
    }
  }
}

TEST(GpuCost, CountsFullGradientsThatAreStillRead) {
  const ModelShapes model = small_gpt(4096, 8, 50304, DType::kBFloat16);
  std::int64_t largest = 0;
  for (const ParamShape& param : model.params) {
    largest = std::max(largest, 2 * param.numel);
  }
  MemoryPlanOptions options = in_host();
  options.cpu_share = 0;
  EXPECT_EQ(planned(model, options).full_gradient_bytes, largest) << "none leaves";
  options.cpu_share = 1;
  const MemoryPlan leaving = planned(model, options);
  EXPECT_EQ(leaving.kept_gradient_bytes, kGiB);
  EXPECT_EQ(leaving.full_gradient_bytes, largest + leaving.kept_gradient_bytes);
  EXPECT_EQ(planned(model, options, 3).kept_gradient_bytes, leaving.kept_gradient_bytes)
      << "converted on the device";
  options.device_bytes = 4 * kGiB;
  EXPECT_EQ(planned(model, options).kept_gradient_bytes, std::max(largest, kGiB / 4));
  const MemoryPlan small = planned(large_gpt(), in_host(), 3);
  EXPECT_EQ(small.kept_gradient_bytes, 2 * small.shard_numel) << "never more than there are";
  EXPECT_EQ(planned(model, on_gpu(Tier::kDevice, Tier::kDevice)).kept_gradient_bytes, 0);
}

TEST(GpuCost, CountsWhatAStepCopiesPerElement) {
  const std::int64_t numel = kMiB;
  const ModelShapes model = equal_units(8, {numel}, DType::kBFloat16);
  MemoryPlanOptions options = in_host();
  options.cpu_share = 0.25;
  const MemoryPlan plan = planned(model, options);
  ASSERT_DOUBLE_EQ(plan.cpu_share, 0.25);
  // States of six both ways; parameters of two H2D, since the device has the others; gradients of
  // two and new values of six D2H.
  EXPECT_EQ(plan.link.h2d, (6 * 12 + 2 * 2) * numel);
  EXPECT_EQ(plan.link.d2h, (6 * 12 + 2 * 2 + 6 * 2) * numel);
  EXPECT_EQ(plan.update.streamed, 6 * numel);
  EXPECT_EQ(plan.update.cpu, 2 * numel);
  // A gradient of each micro-batch leaves the device, and those of six come back.
  EXPECT_EQ(planned(model, options, 3).link.d2h, (6 * 12 + 8 * 3 * 2 + 6 * 2) * numel);
  EXPECT_EQ(planned(model, options, 3).link.h2d, (6 * 12 + 6 * 3 * 2 + 8 * 2) * numel);
  options.parameters = Tier::kDevice;
  EXPECT_EQ(planned(model, options).link.h2d, (6 * 12 + 2 * 2) * numel);
  EXPECT_EQ(planned(model, options).link.d2h, (6 * 12 + 2 * 2) * numel);
}

// 12 bytes of states, 2 of the parameter, and 2 of a gradient where the CPU updates.
TEST(GpuCost, HostMemoryHoldsAtMostSixteenBytesPerParameter) {
  for (const double share : {0.0, 0.35, 1.0}) {
    MemoryPlanOptions options = in_host();
    options.cpu_share = share;
    const MemoryPlan plan = planned(small_gpt(1024, 4, 8000, DType::kBFloat16), options);
    EXPECT_LE(static_cast<double>(plan.host_memory_bytes()),
              (14 + 2 * plan.cpu_share + 0.01) * static_cast<double>(plan.shard_numel));
  }
}

TEST(GpuCost, CountsWhatForwardIsHandedByTheUpdate) {
  ModelShapes model = large_gpt();
  MemoryPlanOptions options = on_gpu(Tier::kNvme, Tier::kNvme, true);
  const MemoryPlan plan = planned(model, options);
  const std::int64_t stored = plan.bytes(Tier::kNvme, Role::kShard);
  EXPECT_GT(stored, 0);
  EXPECT_EQ(plan.step.parameters_read, stored) << "they stay until backward";
  EXPECT_EQ(plan.step.parameters_from_update, stored);
  EXPECT_EQ(plan.step.parameters_written, stored);
  EXPECT_EQ(plan.step.states_read, plan.bytes(Tier::kNvme, Role::kOptimizer));
  const auto largest =
      std::max_element(model.params.begin(), model.params.end(),
                       [](const auto& a, const auto& b) { return a.numel < b.numel; });
  largest->trainable = false;
  EXPECT_LT(planned(model, options).step.parameters_from_update, stored)
      << "nobody hands over what is frozen";
  options.parameter_buffers = 1;
  options.parameter_buffer_bytes = 64 << 10;
  EXPECT_EQ(planned(model, options).step.parameters_from_update, 0)
      << "they do not fit into the window";
}

// States of 8 bytes, and a master of 4, which is the parameter itself or one of the states.
TEST(CpuCost, CountsWhatAStepReadsAndWritesPerElement) {
  const std::int64_t numel = kMiB;
  const std::int64_t all = 8 * numel;
  const MemoryPlan plan = planned(equal_units(8, {numel}), with_budget(9 * kMiB), 3);
  ASSERT_EQ(plan.bytes(Tier::kNvme, Role::kShard), 4 * all);
  ASSERT_EQ(plan.bytes(Tier::kNvme, Role::kGradient), 4 * all);
  EXPECT_EQ(plan.step.states_read, 12 * all);
  EXPECT_EQ(plan.step.states_written, 12 * all);
  EXPECT_EQ(plan.step.parameters_written, 0);
  EXPECT_EQ(plan.step.parameters_read, 3 * 2 * 4 * all);
  EXPECT_EQ(plan.step.gradients_written, 3 * 4 * all);
  EXPECT_EQ(plan.step.gradients_read, (2 + 1) * 4 * all);
  EXPECT_EQ(plan.full_gradient_bytes, 4 * numel);
  // For the norm of gradients on NVMe, one number per block of a shard stays in memory.
  EXPECT_EQ(plan.bytes(Tier::kHost, Role::kGradient),
            taken_bytes(8 * grad::num_norm_blocks(numel) * as_int(sizeof(double))));

  const MemoryPlan low = planned(equal_units(8, {numel}, DType::kBFloat16), with_budget(5 * kMiB));
  ASSERT_EQ(low.bytes(Tier::kNvme, Role::kShard), 2 * all);
  EXPECT_EQ(low.bytes(Tier::kNvme, Role::kOptimizer), 12 * all);
  EXPECT_EQ(low.step.states_read, 12 * all);
  EXPECT_EQ(low.step.states_written, 12 * all);
  EXPECT_EQ(low.step.parameters_written, 2 * all);
}

TEST(CpuCost, BuffersHoldTheLargestSubGroupAsOftenAsThereAreBuffers) {
  for (const ModelShapes& model : small_models()) {
    const std::int64_t all = planned(model, with_budget(kUnlimited)).memory_bytes();
    for (const std::int64_t part : {30, 50, 80}) {
      const MemoryPlanOptions options = with_budget(all * part / 100 + kMiB);
      const MemoryPlan plan = planned(model, options);
      if (plan.uses_nvme) {
        const auto groups = sub_groups(CutModel(model, options), plan.params, plan.sub_group_numel);
        EXPECT_EQ(plan.optimizer_pool_bytes,
                  plan.num_optimizer_buffers * as_int(groups.max_lease_bytes));
        EXPECT_EQ(plan.bytes(Tier::kNvme, Role::kOptimizer), as_int(groups.nvme_states_bytes));
      }
    }
  }
}

TEST(CpuCost, ChecksumsAreCountedWhereTheyAreKept) {
  MemoryPlanOptions options = with_budget(4 * kMiB);
  options.verify = true;
  const MemoryPlan plan = planned(small_gpt(64, 4, 3000), options);
  ASSERT_TRUE(plan.uses_nvme);
  EXPECT_EQ(plan.bytes(Tier::kHost, Role::kOther), plan.bytes(Tier::kNvme) / 4096 * 8);
  EXPECT_LE(plan.memory_bytes(), options.host_bytes);
}

TEST(PlannedExtents, FollowEachOtherAndAreWhatTheLedgerSays) {
  std::vector<ModelShapes> models = small_models();
  models.push_back(large_gpt());
  for (const ModelShapes& model : models) {
    for (MemoryPlanOptions options :
         {with_budget(kUnlimited, 2), on_gpu(Tier::kNvme, Tier::kNvme, true)}) {
      options.parameters = Tier::kNvme;
      options.optimizer = Tier::kNvme;
      options.parameters_host_bytes = 0;
      const MemoryPlan plan = planned(model, options);
      std::map<Role, std::int64_t> ends;
      for (const PlannedExtent& extent :
           planned_extents(model, options, plan, {"exp_avg", "exp_avg_sq"})) {
        EXPECT_EQ(extent.offset, ends[extent.role]);
        EXPECT_EQ(extent.bytes, blocks(extent.bytes));
        EXPECT_GT(extent.bytes, 0);
        ends[extent.role] += extent.bytes;
      }
      for (const Role role : {Role::kShard, Role::kGradient, Role::kOptimizer}) {
        EXPECT_EQ(ends[role], plan.bytes(Tier::kNvme, role));
      }
    }
  }
}

// Frozen weights as int4 blocks of 128: 66 bytes for 128 elements, in every tier.
TEST(MemoryCost, FrozenWeightsAreCountedAsTheyAreStored) {
  constexpr std::int64_t kNumel = std::int64_t{1} << 20;
  ModelMaker maker(DType::kBFloat16);
  maker.unit("frozen", {kNumel, kNumel}, false);
  maker.unit("trained", {kNumel});
  ModelShapes model = maker.make();
  Config config;
  config.set("precision", std::string("bf16"));
  config.set("quant.frozen_bits", std::int64_t{4});
  for (const char* tier : {"device", "host"}) {
    for (const int ranks : {1, 4}) {
      config.set("place.parameters", std::string(tier));
      config.set("place.optimizer", std::string(tier));
      MemoryPlanOptions options = MemoryPlanOptions::from(config, ranks, /*is_discrete=*/true);
      const MemoryPlan plan = planned(model, options);
      const bool on_host = tier == std::string("host");
      const std::int64_t stored = kNumel / ranks * 66 / 128;
      const std::int64_t trained = 2 * kNumel / ranks;
      const Tier home = on_host ? Tier::kPinned : Tier::kDevice;
      EXPECT_EQ(plan.bytes(home, Role::kShard),
                on_host ? 2 * pages(stored) + pages(trained) : 2 * stored + trained)
          << tier << ", " << ranks << " ranks";
      // All is gathered: in a group of one what is decoded, or in host memory.
      const std::int64_t behind = on_host ? 2 * stored : 0;
      const std::int64_t all = ranks == 1 && !on_host ? 4 * kNumel : 6 * kNumel;
      EXPECT_GE(plan.arena_bytes, 4 * kNumel + behind);
      EXPECT_LE(plan.arena_bytes, all + 4 * kNumel + 2 * behind);
      if (on_host) {  // once per step, as blocks, where all stay gathered
        EXPECT_LE(plan.link.h2d - 2 * stored, trained + 12 * kNumel);
      }
      model.params[0].num_dims = 1;  // a bias
      EXPECT_GT(planned(model, options).bytes(home, Role::kShard), plan.bytes(home, Role::kShard));
      model.params[0].num_dims = 2;
    }
  }
}

// Sums in fp32 go to the device and back once per step; the last micro-batch is added there, and
// is not copied by itself.
TEST(GpuCost, CountsWhatSumsOverReplicasCopy) {
  const std::int64_t numel = kMiB;
  const ModelShapes model = equal_units(8, {numel}, DType::kBFloat16);
  MemoryPlanOptions options = in_host();
  options.wire_dtype = DType::kBFloat16;
  options.cpu_share = 1;
  const auto link = [&](int num_copies, std::int64_t num_micro_batches) {
    options.num_copies = num_copies;
    return planned(model, options, num_micro_batches).link;
  };
  EXPECT_EQ(link(2, 1).h2d, link(1, 1).h2d) << "summed before they leave";
  EXPECT_EQ(link(2, 1).d2h, link(1, 1).d2h);
  EXPECT_EQ(link(2, 3).h2d, link(1, 3).h2d + 8 * 4 * numel);
  EXPECT_EQ(link(2, 3).d2h, link(1, 3).d2h + 8 * (4 - 2) * numel);
}

}  // namespace
}  // namespace tessera::planner
