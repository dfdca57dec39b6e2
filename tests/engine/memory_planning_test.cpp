// Memory of an engine where nobody gave a number: what does not fit is refused before anything is
// allocated, on all ranks; ranks of a host share what it has.
#include "tessera/engine/memory_planning.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/engine/update_rates.h"
#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

planner::ModelShapes shapes_of(std::int64_t numel) {
  planner::ModelShapes shapes;
  shapes.params.push_back({"unit.weight", numel, true, false});
  shapes.units.push_back({0});
  shapes.unit_names.push_back("unit");
  return shapes;
}

// More than any machine has.
constexpr std::int64_t kTooMany = std::int64_t{1} << 40;

std::string refusal(Runtime& runtime, const planner::ModelShapes& shapes) {
  EngineOptions options;
  options.shapes = shapes;
  try {
    const Engine engine(runtime, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(MemoryPlanning, AModelThatDoesNotFitIsRefusedWithTheArithmeticBeforeAnythingIsAllocated) {
  for (const int ranks : {1, 3}) {
    comm::run_ranks(ranks, [&](comm::Group& group) {
      Runtime runtime(adam_config(1e-3), group, {-1, 1});
      const std::string text = refusal(runtime, shapes_of(kTooMany));
      const std::string left =
          ranks == 1 ? "left for it" : "left for each of " + std::to_string(ranks) + " ranks";
      for (const std::string& part :
           {"the model does not fit: one of " + std::to_string(ranks),
            std::string(" parameters + "), std::string(" gradients + "),
            std::string(" optimizer states"), left, std::string("--nvme DIR"),
            std::string("memory.host = unlimited")}) {
        EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
      }
      EXPECT_EQ(runtime.ledger().peak_bytes(Tier::kDevice), 0U);
      EXPECT_EQ(refusal(runtime, shapes_of(1000)), "") << "the ranks go on";
    });
  }
}

TEST(UpdateRates, AreMeasuredWithAPartOfWhatARankHasFree) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  EXPECT_EQ(update_rate_sizes(planner::kUnlimited).host_bytes(), 2048 * kMiB);
  EXPECT_EQ(update_rate_sizes(16 * 1024 * kMiB).host_bytes(), 2048 * kMiB);
  EXPECT_EQ(update_rate_sizes(16 * 1024 * kMiB - 1).host_bytes(), 1024 * kMiB);
  EXPECT_EQ(update_rate_sizes(1024 * kMiB).host_bytes(), 128 * kMiB);
  for (const std::int64_t free_bytes : {std::int64_t{0}, 100 * kMiB, 7000 * kMiB}) {
    const UpdateRateSizes sizes = update_rate_sizes(free_bytes);
    EXPECT_LE(sizes.host_bytes(), std::max(16 * kMiB, free_bytes / 8));
    EXPECT_GE(sizes.host_bytes(), 16 * kMiB);
    EXPECT_EQ(sizes.numel % sizes.span_numel, 0);
    EXPECT_GT(sizes.numel, sizes.span_numel);
    EXPECT_GT(sizes.copy_bytes, 0U);
  }
}

TEST(MemoryPlanning, AnUnlimitedBudgetTurnsTheCheckOff) {
  comm::run_ranks(1, [](comm::Group& group) {
    Config config = adam_config(1e-3);
    config.apply_flag("memory.host=unlimited");
    Runtime runtime(config, group, {-1, 1});
    EXPECT_EQ(refusal(runtime, shapes_of(kTooMany)), "");
  });
}

TEST(MemoryPlanning, WhatFitsIsNotPlanned) {
  comm::run_ranks(2, [](comm::Group& group) {
    Runtime runtime(adam_config(1e-3), group, {-1, 1});
    const MemoryPlanning planning = plan_memory(runtime, group, shapes_of(1000));
    EXPECT_FALSE(planning.plan.has_value());
    EXPECT_EQ(planning.note, "");
  });
}

TEST(MemoryPlanning, RanksOfAHostShareItsMemory) {
  std::atomic<std::int64_t> share_of_one{0};
  comm::run_ranks(1, [&](comm::Group& group) {
    Runtime runtime(adam_config(1e-3), group, {-1, 1});
    EXPECT_EQ(runtime.num_local_ranks(), 1);
    share_of_one = plan_memory(runtime, group, shapes_of(1000)).memory.host.num_ranks;
  });
  EXPECT_EQ(share_of_one, 1);
  for (const int ranks : {2, 3}) {
    comm::run_ranks(ranks, [&](comm::Group& group) {
      Runtime runtime(adam_config(1e-3), group, {-1, 1});
      EXPECT_EQ(runtime.num_local_ranks(), ranks);
      EXPECT_EQ(runtime.local_rank(), group.rank());
      const planner::SharedMemory host = plan_memory(runtime, group, shapes_of(1000)).memory.host;
      EXPECT_EQ(host.num_ranks, ranks);
      EXPECT_EQ(host.of_rank(), host.free_bytes / ranks);
    });
  }
}

TEST(MemoryPlanning, WhatAnEngineHasTakenCountsAsFree) {
  comm::run_ranks(2, [](comm::Group& group) {
    Runtime runtime(adam_config(1e-3), group, {-1, 1});
    constexpr std::int64_t kHeld = std::int64_t{1} << 50;
    const planner::SharedMemory host =
        plan_memory(runtime, group, shapes_of(1000), {}, {0, kHeld}).memory.host;
    EXPECT_GE(host.of_rank(), kHeld);
    EXPECT_LT(host.of_rank(), 2 * kHeld);
  });
}

}  // namespace
}  // namespace tessera::testing
