// What options and DeepSpeed's keys ask for is what is planned.
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
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

MemoryPlan plan(const Config& config, const ModelShapes& model, int num_ranks = 1) {
  return plan_memory(model, MemoryPlanOptions::from(config, num_ranks, false), 1);
}

TEST(PlacementConfig, NothingGivenMeansEverythingInMemoryAndNoLimit) {
  const MemoryPlanOptions options = MemoryPlanOptions::from(Config(), 2, false);
  EXPECT_EQ(options.memory_bytes(), kUnlimited);
  EXPECT_FALSE(options.has_nvme);
  EXPECT_EQ(options.num_states, 2);
  EXPECT_FALSE(options.is_bucket_given);
}

TEST(PlacementConfig, TheSmallerOfBothBudgetsBoundsOneMemory) {
  Config config;
  config.set("memory.host", "300MiB");
  config.set("memory.device", "200MiB");
  EXPECT_EQ(MemoryPlanOptions::from(config, 1, false).memory_bytes(), std::int64_t{200} << 20);
}

TEST(PlacementConfig, NvmeOfZeroBytesIsNoNvme) {
  Config config;
  config.set("nvme.paths", std::vector<std::string>{"/some/disk"});
  EXPECT_TRUE(MemoryPlanOptions::from(config, 1, false).has_nvme);
  config.set("memory.nvme", std::int64_t{0});
  EXPECT_FALSE(MemoryPlanOptions::from(config, 1, false).has_nvme);
}

TEST(PlacementConfig, AWishThatItsBudgetForbidsIsAnError) {
  Config config;
  config.set("place.optimizer", "host");
  config.set("memory.host", std::int64_t{0});
  EXPECT_THROW(MemoryPlanOptions::from(config, 1, false), ConfigError);
}

TEST(PlacementConfig, NvmeWithoutAPathIsAnError) {
  Config config;
  config.set("place.parameters", "nvme");
  EXPECT_THROW(MemoryPlanOptions::from(config, 1, false), ConfigError);
}

TEST(PlacementConfig, StatesFollowTheUpdateRule) {
  Config config;
  config.set("optim.kind", "sgd");
  EXPECT_EQ(MemoryPlanOptions::from(config, 1, false).num_states, 0);
  config.set("optim.momentum", 0.9);
  EXPECT_EQ(MemoryPlanOptions::from(config, 1, false).num_states, 1);
}

TEST(DeepSpeedKeys, OffloadToCpuIsChargedToTheHost) {
  const ModelShapes model = small_gpt(64, 2, 1000);
  const MemoryPlan placement =
      plan(zero3(R"(, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"})"),
           model);
  EXPECT_FALSE(placement.uses_nvme);
  EXPECT_EQ(placement.bytes(Tier::kDevice, Role::kShard), 0);
  EXPECT_EQ(placement.bytes(Tier::kDevice, Role::kOptimizer), 0);
  EXPECT_GT(placement.bytes(Tier::kHost, Role::kShard), 0);
  EXPECT_GT(placement.bytes(Tier::kHost, Role::kOptimizer), 0);
}

TEST(DeepSpeedKeys, OffloadedOptimizerOfNvmeIsThereWithAsManyBuffers) {
  const ModelShapes model = small_gpt(256, 2, 4000);
  const MemoryPlan placement = plan(zero3(R"(, "offload_optimizer": {"device": "nvme",
      "nvme_path": "/some/disk", "buffer_count": 3}, "sub_group_size": 327680)"),
                                    model);
  for (const Placement& each : placement.params) {
    EXPECT_EQ(each.states, Tier::kNvme);
    EXPECT_EQ(each.parameter, Tier::kDevice);
    EXPECT_EQ(each.gradient, Tier::kDevice);
  }
  EXPECT_EQ(placement.num_optimizer_buffers, 3);
  // Smaller where all buffers would not be used otherwise.
  EXPECT_LE(placement.sub_group_numel, 327680);
  EXPECT_GE(placement.sub_group_numel, 327680 / 4);
}

TEST(DeepSpeedKeys, MaxInCpuStaysInMemoryInTheOrderOfRegistration) {
  ModelMaker maker;
  maker.unit("a", {1000, 1000, 1000, 1000});
  const MemoryPlan placement = plan(zero3(R"(, "offload_param": {"device": "nvme",
      "nvme_path": "/some/disk", "max_in_cpu": 2500, "buffer_count": 2, "buffer_size": 100000})"),
                                    maker.make());
  EXPECT_EQ(placement.params[0].parameter, Tier::kDevice);
  EXPECT_EQ(placement.params[1].parameter, Tier::kDevice);
  EXPECT_EQ(placement.params[2].parameter, Tier::kNvme);
  EXPECT_EQ(placement.params[3].parameter, Tier::kNvme);
  EXPECT_EQ(placement.params[0].states, Tier::kDevice);
}

TEST(DeepSpeedKeys, BuffersOfParametersAreAsLargeAsTheySayButNoLargerThanAllOfThem) {
  ModelMaker maker;
  for (int i = 0; i < 8; ++i) {
    maker.unit("u" + std::to_string(i), {std::int64_t{1} << 18});
  }
  const auto pool_of = [&](const std::string& sizes) {
    return plan(zero3(R"(, "offload_param": {"device": "nvme", "nvme_path": "/some/disk",
                      "max_in_cpu": 0, )" +
                      sizes + "}"),
                maker.make())
        .parameter_pool_bytes;
  };
  EXPECT_EQ(pool_of(R"("buffer_count": 3, "buffer_size": 262144)"), 3 * (std::int64_t{1} << 20));
  EXPECT_EQ(pool_of(R"("buffer_count": 5, "buffer_size": 100000000)"), std::int64_t{8} << 20);
}

}  // namespace
}  // namespace tessera::planner
