// What options and DeepSpeed's keys ask for is what is planned.
#include <string>

#include <gtest/gtest.h>

#include "tessera/comm/ipc_backend.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/core/config.h"
#include "tessera/planner/memory_planner.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

Config zero3(const std::string& zero, const std::string& rest = "") {
  return Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3)" + zero + "}" +
          rest + "}",
      "test");
}

MemoryPlan planned(const Config& config, const ModelShapes& model) {
  return planned(model, MemoryPlanOptions::from(config, 1, false));
}

TEST(MemoryPlanOptionsTest, NothingGivenMeansEverythingInMemoryAndNoLimit) {
  const MemoryPlanOptions options = MemoryPlanOptions::from(Config(), 2, true);
  EXPECT_EQ(options.memory_bytes(), kUnlimited);
  EXPECT_FALSE(options.has_nvme || options.is_bucket_given || options.is_live_limit_given ||
               options.is_max_inflight_given || options.is_reuse_distance_given);
  EXPECT_FALSE(options.parameters || options.optimizer);
  EXPECT_EQ(options.num_states, 2);
  EXPECT_LT(options.cpu_share, 0);
}

TEST(MemoryPlanOptionsTest, WhatIsGivenReachesThePlan) {
  Config config;
  config.set("memory.host", "300MiB");
  config.set("memory.device", "200MiB");
  config.set("optim.cpu_share", 0.25);
  config.set("live.limit_bytes", "1GiB");
  config.set("prefetch.max_inflight", std::int64_t{3});
  config.set("live.reuse_distance_bytes", "1MiB");
  config.set("optim.kind", "sgd");
  MemoryPlanOptions options = MemoryPlanOptions::from(config, 1, false);
  EXPECT_EQ(options.memory_bytes(), 200 * kMiB) << "the smaller one bounds one memory";
  EXPECT_EQ(options.cpu_share, 0.25);
  EXPECT_TRUE(options.is_live_limit_given && options.is_max_inflight_given &&
              options.is_reuse_distance_given);
  EXPECT_EQ(options.num_states, 0);
  config.set("optim.momentum", 0.9);
  EXPECT_EQ(MemoryPlanOptions::from(config, 1, false).num_states, 1);
}

// As if all ranks were on one host.
TEST(MemoryPlanOptionsTest, ChunksOfGroupsThatShareMemoryAreInThePlan) {
  struct Case {
    const char* backend;
    int num_ranks;
    bool is_discrete;
    Tier tier;
    std::size_t bytes;
  };
  const ModelShapes model = small_gpt(64, 2, 1000);
  for (const Case& each : {Case{"auto", 2, false, Tier::kHost, comm::kShmChunks.bytes},
                           {"auto", 2, true, Tier::kDevice, comm::kIpcChunks.bytes},
                           {"shm", 2, true, Tier::kHost, comm::kShmChunks.bytes},
                           {"gloo", 2, false, Tier::kHost, 0},
                           {"nccl", 2, true, Tier::kHost, 0},
                           {"auto", 1, false, Tier::kHost, 0}}) {
    SCOPED_TRACE(std::string(each.backend) + (each.is_discrete ? ", discrete" : ""));
    Config config;
    config.set("comm.backend", each.backend);
    MemoryPlanOptions options = MemoryPlanOptions::from(config, each.num_ranks, each.is_discrete);
    const MemoryPlan plan = planned(model, options);
    options.group_memory = {};
    const MemoryPlan without = planned(model, options);
    const auto bytes = 2 * static_cast<std::int64_t>(each.bytes);
    const auto staging = [&](const MemoryPlan& of) {
      std::int64_t found = 0;
      for (const LedgerLine& line : of.ledger_with_groups()) {
        found += line.tier == each.tier && line.role == Role::kStaging ? line.bytes : 0;
      }
      return found;
    };
    EXPECT_EQ(staging(plan), staging(without) + bytes);
    EXPECT_EQ(plan.memory_bytes(), without.memory_bytes() + bytes);
    EXPECT_EQ(plan.device_memory_bytes(),
              without.device_memory_bytes() + (each.tier == Tier::kDevice ? bytes : 0));
    options.group_memory = {each.tier, each.bytes};
    if (each.bytes == 0) {
      continue;  // there may be nothing to make smaller
    }
    if (each.is_discrete) {
      options.device_bytes = plan.device_memory_bytes() - 1;
      EXPECT_LE(planned(model, options).device_memory_bytes(), options.device_bytes);
    } else {
      options.host_bytes = plan.memory_bytes() - 1;
      EXPECT_LE(planned(model, options).memory_bytes(), options.host_bytes);
    }
  }
}

TEST(MemoryPlanOptionsTest, NvmeOfZeroBytesIsNoNvme) {
  Config config;
  config.set("nvme.paths", std::vector<std::string>{"/some/disk"});
  EXPECT_TRUE(MemoryPlanOptions::from(config, 1, false).has_nvme);
  config.set("memory.nvme", std::int64_t{0});
  EXPECT_FALSE(MemoryPlanOptions::from(config, 1, false).has_nvme);
}

TEST(MemoryPlanOptionsTest, ATierThatItsBudgetForbidsOrWithoutAPathIsAnError) {
  Config forbidden;
  forbidden.set("place.optimizer", "host");
  forbidden.set("memory.host", std::int64_t{0});
  EXPECT_THROW(MemoryPlanOptions::from(forbidden, 1, false), ConfigError);
  Config without_path;
  without_path.set("place.parameters", "nvme");
  EXPECT_THROW(MemoryPlanOptions::from(without_path, 1, false), ConfigError);
}

TEST(DeepSpeedKeys, OffloadToCpuIsChargedToTheHost) {
  const ModelShapes model = small_gpt(64, 2, 1000);
  const MemoryPlan plan = planned(
      zero3(R"(, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"})"),
      model);
  EXPECT_FALSE(plan.uses_nvme);
  EXPECT_EQ(plan.bytes(Tier::kDevice, Role::kShard), 0);
  EXPECT_EQ(plan.bytes(Tier::kDevice, Role::kOptimizer), 0);
  EXPECT_GT(plan.bytes(Tier::kHost, Role::kShard), 0);
  EXPECT_GT(plan.bytes(Tier::kHost, Role::kOptimizer), 0);
}

TEST(DeepSpeedKeys, OffloadedOptimizerOfNvmeIsThereWithAsManyBuffers) {
  const ModelShapes model = small_gpt(256, 2, 4000);
  const MemoryPlan plan = planned(zero3(R"(, "offload_optimizer": {"device": "nvme",
      "nvme_path": "/some/disk", "buffer_count": 3}, "sub_group_size": 327680)"),
                                  model);
  for (const Placement& each : plan.params) {
    EXPECT_EQ(each.states, Tier::kNvme);
    EXPECT_EQ(each.parameter, Tier::kDevice);
    EXPECT_EQ(each.gradient, Tier::kDevice);
  }
  EXPECT_EQ(plan.num_optimizer_buffers, 3);
  // Smaller where all buffers would not be used otherwise.
  EXPECT_LE(plan.sub_group_numel, 327680);
  EXPECT_GE(plan.sub_group_numel, 327680 / 4);
}

TEST(DeepSpeedKeys, MaxInCpuStaysInMemoryInTheOrderOfRegistration) {
  const ModelShapes model = equal_units(1, {1000, 1000, 1000, 1000});
  const MemoryPlan plan = planned(zero3(R"(, "offload_param": {"device": "nvme",
      "nvme_path": "/some/disk", "max_in_cpu": 2500, "buffer_count": 2, "buffer_size": 100000})"),
                                  model);
  EXPECT_EQ(plan.params[0].parameter, Tier::kDevice);
  EXPECT_EQ(plan.params[1].parameter, Tier::kDevice);
  EXPECT_EQ(plan.params[2].parameter, Tier::kNvme);
  EXPECT_EQ(plan.params[3].parameter, Tier::kNvme);
  EXPECT_EQ(plan.params[0].states, Tier::kDevice);
}

TEST(DeepSpeedKeys, BuffersOfParametersAreAsLargeAsTheySayButNoLargerThanAllOfThem) {
  const ModelShapes model = equal_units(8, {std::int64_t{1} << 18});
  const auto pool_of = [&](const std::string& sizes) {
    return planned(zero3(R"(, "offload_param": {"device": "nvme", "nvme_path": "/some/disk",
                      "max_in_cpu": 0, )" +
                         sizes + "}"),
                   model)
        .parameter_pool_bytes;
  };
  EXPECT_EQ(pool_of(R"("buffer_count": 3, "buffer_size": 262144)"), 3 * (std::int64_t{1} << 20));
  EXPECT_EQ(pool_of(R"("buffer_count": 5, "buffer_size": 100000000)"), std::int64_t{8} << 20);
}

}  // namespace
}  // namespace tessera::planner
