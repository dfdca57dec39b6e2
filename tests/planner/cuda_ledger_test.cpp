// What a plan for CUDA says will be charged is, line by line, the sum over parameters; and what
// cannot be had is refused with the arithmetic and a remedy that works.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/units.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/machine_limits.h"
#include "tessera/shard/layout.h"
#include "tessera/tier/io_engine.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

using LineSums = std::map<std::pair<Tier, Role>, std::int64_t>;

std::int64_t up_to(std::int64_t bytes, std::int64_t step) {
  return (bytes + step - 1) / step * step;
}
std::int64_t pages(std::int64_t bytes) {
  return up_to(bytes, static_cast<std::int64_t>(device::page_bytes()));
}
std::int64_t blocks(std::int64_t bytes) { return up_to(bytes, 4096); }

// As the rules say, of one rank; but for buffers of NVMe.
LineSums expected_lines(const ModelShapes& model, const MemoryPlan& plan, int num_tensors) {
  LineSums sums;
  const auto element = static_cast<std::int64_t>(bytes_of(model.dtype));
  const std::int64_t gradient = plan.gradients_leave_early ? element : 4;
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
    if (device_updates(each)) {
      sums[{Tier::kDevice, Role::kGradient}] += layout.numel() * gradient;
    } else {
      sums[{Tier::kPinned, Role::kGradient}] += pages(layout.shard_numel() * gradient);
      if (!plan.gradients_leave_early) {
        sums[{Tier::kDevice, Role::kGradient}] += 4 * layout.numel();
      }
      if (each.parameter == Tier::kDevice) {
        sums[{Tier::kPinned, Role::kStaging}] += pages(shard);
      }
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
    sums[{Tier::kPinned, Role::kStaging}] +=
        pages(plan.optimizer_pool_bytes) +
        pages(blocks(static_cast<std::int64_t>(2 * feed.tile_bytes))) +
        pages(blocks(static_cast<std::int64_t>(feed.window_bytes)));
  }
  return sums;
}

TEST(CudaLedger, EveryLineIsTheSumOverParameters) {
  std::vector<ModelShapes> models = small_models();
  models.push_back(large_gpt());
  models.push_back(large_gpt(DType::kFloat32));
  for (const ModelShapes& model : models) {
    for (const std::optional<Tier> parameters :
         std::initializer_list<std::optional<Tier>>{{}, Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      for (const std::optional<Tier> optimizer :
           std::initializer_list<std::optional<Tier>>{{}, Tier::kHost, Tier::kNvme}) {
        for (const std::int64_t num_micro_batches : {1, 3}) {
          MemoryPlanOptions options = on_gpu(parameters, optimizer, true);
          const MemoryPlan plan = plan_memory(model, options, num_micro_batches);
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

TEST(CudaLedger, CountsFullGradientsThatAreOnTheirWay) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  const ModelShapes model = small_gpt(4096, 8, 50304, DType::kBFloat16);
  std::int64_t largest = 0;
  for (const ParamShape& param : model.params) {
    largest = std::max(largest, 2 * param.numel);
  }
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.cpu_share = 0;
  EXPECT_EQ(plan_memory(model, options, 1).full_gradient_bytes, largest) << "none leaves";
  options.cpu_share = 1;
  const MemoryPlan leaving = plan_memory(model, options, 1);
  EXPECT_EQ(leaving.kept_gradient_bytes, kGiB);
  EXPECT_EQ(leaving.full_gradient_bytes, largest + leaving.kept_gradient_bytes);
  EXPECT_EQ(plan_memory(model, options, 3).kept_gradient_bytes, leaving.kept_gradient_bytes)
      << "converted on the device";
  options.device_bytes = 4 * kGiB;
  EXPECT_EQ(plan_memory(model, options, 1).kept_gradient_bytes, std::max(largest, kGiB / 4));
  const MemoryPlan small = plan_memory(large_gpt(), on_gpu(Tier::kHost, Tier::kHost), 3);
  EXPECT_EQ(small.kept_gradient_bytes, 2 * small.shard_numel) << "never more than there are";
  const MemoryPlan resident = plan_memory(model, on_gpu(Tier::kDevice, Tier::kDevice), 1);
  EXPECT_EQ(resident.kept_gradient_bytes, 0);
}

TEST(CudaLedger, CountsWhatAStepMovesPerElement) {
  const std::int64_t numel = std::int64_t{1} << 20;
  ModelMaker maker(DType::kBFloat16);
  for (int i = 0; i < 8; ++i) {
    maker.unit("u" + std::to_string(i), {numel});
  }
  const ModelShapes model = maker.make();
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.cpu_share = 0.25;
  const MemoryPlan in_host = plan_memory(model, options, 1);
  ASSERT_DOUBLE_EQ(in_host.cpu_share, 0.25);
  // States of six up and down; parameters of two up, since the device has the others; gradients of
  // two and new values of six down.
  EXPECT_EQ(in_host.link.h2d, (6 * 12 + 2 * 2) * numel);
  EXPECT_EQ(in_host.link.d2h, (6 * 12 + 2 * 2 + 6 * 2) * numel);
  EXPECT_EQ(in_host.update.streamed, 6 * numel);
  EXPECT_EQ(in_host.update.cpu, 2 * numel);
  // Sums of several micro-batches go down in fp32.
  EXPECT_EQ(plan_memory(model, options, 2).link.d2h, (6 * 12 + 2 * 4 + 6 * 2) * numel);
  EXPECT_EQ(plan_memory(model, options, 2).link.h2d, (6 * 12 + 8 * 2) * numel);
  options.parameters = Tier::kDevice;
  const MemoryPlan on_device = plan_memory(model, options, 1);
  EXPECT_EQ(on_device.link.h2d, (6 * 12 + 2 * 2) * numel);
  EXPECT_EQ(on_device.link.d2h, (6 * 12 + 2 * 2) * numel);
}

// 12 bytes of states, 2 of the parameter, and 2 of a gradient where the processor updates.
TEST(CudaLedger, HostMemoryHoldsAtMostSixteenBytesPerParameter) {
  const ModelShapes model = small_gpt(1024, 4, 8000, DType::kBFloat16);
  for (const double share : {0.0, 0.35, 1.0}) {
    MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
    options.cpu_share = share;
    const MemoryPlan plan = plan_memory(model, options, 1);
    EXPECT_LE(static_cast<double>(plan.host_memory_bytes()),
              (14 + 2 * plan.cpu_share + 0.01) * static_cast<double>(plan.shard_numel));
  }
}

TEST(CudaLedger, ExtentsAreWhatTheLedgerSays) {
  const ModelShapes model = large_gpt();
  const MemoryPlanOptions options = on_gpu(Tier::kNvme, Tier::kNvme, true);
  const MemoryPlan plan = plan_memory(model, options, 1);
  std::map<Role, std::int64_t> sums;
  for (const PlannedExtent& extent :
       planned_extents(model, options, plan, {"exp_avg", "exp_avg_sq"})) {
    EXPECT_EQ(extent.offset, sums[extent.role]);
    sums[extent.role] += extent.bytes;
  }
  EXPECT_EQ(sums[Role::kShard], plan.bytes(Tier::kNvme, Role::kShard));
  EXPECT_EQ(sums[Role::kOptimizer], plan.bytes(Tier::kNvme, Role::kOptimizer));
  EXPECT_EQ(plan.step.states_read, sums[Role::kOptimizer]);
  EXPECT_EQ(plan.step.parameters_written, sums[Role::kShard]);
}

// The remedy works, and nothing below it does.
void expect_remedy(const ModelShapes& model, MemoryPlanOptions options,
                   std::int64_t MemoryPlanOptions::*budget, const std::string& name) {
  options.*budget = std::int64_t{1} << 20;
  const std::string text = refusal_of([&] { plan_memory(model, options, 1); });
  EXPECT_NE(text.find(name + " allows 1.00 MiB"), std::string::npos) << text;
  EXPECT_NE(text.find(" + "), std::string::npos) << text;
  const std::int64_t advised = advised_bytes(text);
  options.*budget = advised;
  EXPECT_EQ(refusal_of([&] { plan_memory(model, options, 1); }), "");
  options.*budget = advised - 1;
  EXPECT_NE(refusal_of([&] { plan_memory(model, options, 1); }), "");
}

TEST(CudaRefusal, ShowsTheSumAndARemedyThatWorks) {
  const ModelShapes model = large_gpt();
  for (const bool has_nvme : {false, true}) {
    expect_remedy(model, on_gpu(Tier::kDevice, Tier::kDevice, has_nvme),
                  &MemoryPlanOptions::device_bytes, "memory.device");
    expect_remedy(model, on_gpu(std::nullopt, std::nullopt, has_nvme),
                  &MemoryPlanOptions::device_bytes, "memory.device");
    expect_remedy(model, on_gpu(Tier::kHost, Tier::kHost, has_nvme), &MemoryPlanOptions::host_bytes,
                  "memory.host");
  }
}

TEST(CudaRefusal, AskForADirectoryOnlyWhereThereIsNone) {
  MemoryPlanOptions options = on_gpu(Tier::kHost, Tier::kHost);
  options.host_bytes = 1 << 20;
  EXPECT_NE(refusal_of([&] { plan_memory(large_gpt(), options, 1); }).find("--nvme DIR"),
            std::string::npos);
  options.has_nvme = true;
  EXPECT_EQ(refusal_of([&] { plan_memory(large_gpt(), options, 1); }).find("--nvme DIR"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] {
              plan_memory(large_gpt(), on_gpu(std::nullopt, Tier::kNvme), 1);
            }).find("nvme needs a directory"),
            std::string::npos);
}

TEST(CudaRefusal, Fp32StatesStayWithTheirMasters) {
  const ModelShapes model = large_gpt(DType::kFloat32);
  EXPECT_NE(refusal_of([&] {
              plan_memory(model, on_gpu(Tier::kHost, Tier::kDevice), 1);
            }).find("their own masters"),
            std::string::npos);
  const MemoryPlan plan = plan_memory(model, on_gpu(Tier::kHost, std::nullopt), 1);
  for (const Placement& each : plan.params) {
    EXPECT_TRUE(each.states != Tier::kDevice || each.parameter == Tier::kDevice);
  }
}

TEST(CudaRefusal, TheMachineIsAskedForHostMemoryOnlyAndForNoLimitOnLocks) {
  const MemoryPlan plan = plan_memory(large_gpt(), on_gpu(Tier::kHost, Tier::kHost), 1);
  MachineLimits limits;
  limits.memory_available_bytes = plan.host_memory_bytes();
  limits.locked_bytes = 0;
  EXPECT_EQ(refusal_of([&] { check_fits(plan, limits, 1); }), "");
  limits.memory_available_bytes -= 1;
  EXPECT_NE(refusal_of([&] { check_fits(plan, limits, 1); }), "");
}

}  // namespace
}  // namespace tessera::planner
