// Plans over small models and many budgets: sums, order, and what a step moves.
#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"
#include "tessera/optim/sub_group.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/shard/layout.h"
#include "tessera/tier/io_engine.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

std::int64_t whole_blocks_of(std::int64_t bytes) {
  return static_cast<std::int64_t>(tier::whole_blocks(static_cast<std::size_t>(bytes)));
}

bool has(const MemoryPlan& placement, Tier Placement::*role, Tier place) {
  return std::any_of(placement.params.begin(), placement.params.end(),
                     [&](const Placement& each) { return each.*role == place; });
}

// Budgets from nothing to more than all, dense where decisions fall.
std::vector<std::int64_t> budgets_for(std::int64_t all_bytes) {
  std::set<std::int64_t> budgets;
  for (std::int64_t i = 1; i <= 150; ++i) {
    budgets.insert(all_bytes * i / 125);
  }
  for (std::int64_t near : {-4096, -1, 0, 1, 4096}) {
    budgets.insert(std::max<std::int64_t>(1, all_bytes + near));
  }
  return {budgets.begin(), budgets.end()};
}

TEST(MemoryPlanner, KeepsEverythingInMemoryWithoutABudget) {
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 3}) {
      MemoryPlanOptions options;
      options.num_ranks = num_ranks;
      const MemoryPlan placement = plan_memory(model, options, 1);
      EXPECT_FALSE(placement.uses_nvme);
      const Placement in_memory{Tier::kDevice, Tier::kDevice, Tier::kDevice, Updater::kCpu};
      EXPECT_EQ(placement.params, std::vector<Placement>(model.params.size(), in_memory));
      EXPECT_EQ(placement.live_limit_bytes, options.live_limit_bytes);
      EXPECT_EQ(placement.bytes(Tier::kDevice) + placement.comm_bytes, placement.memory_bytes());
      EXPECT_EQ(placement.step.read() + placement.step.written(), 0);
    }
  }
}

TEST(MemoryPlanner, KeepsEverythingInMemoryWhereItFitsToTheByte) {
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 2}) {
      MemoryPlanOptions options = with_budget(kUnlimited, num_ranks);
      options.bucket_bytes = std::int64_t{1} << 20;
      options.is_bucket_given = true;
      const std::int64_t all = plan_memory(model, options, 1).memory_bytes();
      options.host_bytes = all;
      const MemoryPlan placement = plan_memory(model, options, 1);
      EXPECT_FALSE(placement.uses_nvme);
      EXPECT_EQ(placement.memory_bytes(), all);
      EXPECT_EQ(placement.optimizer_pool_bytes + placement.gradient_pool_bytes +
                    placement.parameter_pool_bytes,
                0);
    }
  }
}

TEST(MemoryPlanner, ArenaGivesWayBeforeAnyShardDoes) {
  const ModelShapes model = small_gpt(64, 4, 2000);
  MemoryPlanOptions options = with_budget(kUnlimited, 2);
  options.bucket_bytes = std::int64_t{1} << 20;
  options.is_bucket_given = true;
  const MemoryPlan whole = plan_memory(model, options, 1);
  options.host_bytes = whole.memory_bytes() - (std::int64_t{300} << 10);
  const MemoryPlan tight = plan_memory(model, options, 1);
  EXPECT_FALSE(tight.uses_nvme);
  EXPECT_LT(tight.arena_bytes, whole.arena_bytes);
  EXPECT_EQ(tight.live_limit_bytes, tight.arena_bytes);
}

// The heart: any budget gives a plan within it, or a refusal; a larger one never stores more, and
// never refuses what a smaller one allowed.
TEST(MemoryPlanner, SumsStayWithinEveryBudgetAndALargerOneNeverStoresMore) {
  for (const ModelShapes& model : small_models()) {
    for (const int num_ranks : {1, 2, 3}) {
      const std::int64_t all =
          plan_memory(model, with_budget(kUnlimited, num_ranks), 1).memory_bytes();
      std::int64_t stored_before = kUnlimited;
      bool was_possible = false;
      for (const std::int64_t budget : budgets_for(all + (std::int64_t{2} << 20))) {
        SCOPED_TRACE(testing::Message() << model.params.front().name << " on " << num_ranks
                                        << " ranks within " << budget);
        MemoryPlan placement;
        try {
          placement = plan_memory(model, with_budget(budget, num_ranks), 1);
        } catch (const ConfigError&) {
          ASSERT_FALSE(was_possible);
          continue;
        }
        was_possible = true;
        ASSERT_LE(placement.memory_bytes(), budget);
        const std::int64_t stored = placement.bytes(Tier::kNvme);
        ASSERT_LE(stored, stored_before);
        ASSERT_EQ(placement.uses_nvme, stored > 0);
        stored_before = stored;
      }
      EXPECT_EQ(stored_before, 0) << "the largest budget holds everything";
    }
  }
}

TEST(MemoryPlanner, StatesLeaveMemoryFirstThenGradientsThenParameters) {
  const ModelShapes model = small_gpt(64, 6, 3000);
  const std::int64_t all = plan_memory(model, with_budget(kUnlimited), 1).memory_bytes();
  bool saw_states = false;
  bool saw_gradients = false;
  bool saw_parameters = false;
  for (std::int64_t part = 99; part >= 20; --part) {
    MemoryPlan placement;
    try {
      placement = plan_memory(model, with_budget(all * part / 100), 1);
    } catch (const ConfigError&) {
      break;
    }
    const bool states = has(placement, &Placement::states, Tier::kNvme);
    const bool gradients = has(placement, &Placement::gradient, Tier::kNvme);
    const bool parameters = has(placement, &Placement::parameter, Tier::kNvme);
    EXPECT_TRUE(!gradients || states);
    EXPECT_TRUE(!parameters || gradients);
    saw_states = saw_states || states;
    saw_gradients = saw_gradients || gradients;
    saw_parameters = saw_parameters || parameters;
  }
  EXPECT_TRUE(saw_states && saw_gradients && saw_parameters);
}

TEST(MemoryPlanner, SmallParametersStayWhereLargeOnesThatAreUsedEarlierDoNot) {
  const ModelShapes model = small_gpt(32, 2, 20000);
  const MemoryPlan placement = plan_memory(model, with_budget(std::int64_t{5} << 20), 1);
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const bool is_small = model.params[i].numel * 4 <= kSmallParamBytes;
    EXPECT_EQ(placement.params[i].parameter, is_small ? Tier::kDevice : Tier::kNvme)
        << model.params[i].name;
  }
}

TEST(MemoryPlanner, ArenaHoldsTheLargestUnitThatIsGathered) {
  const ModelShapes model = small_gpt(64, 6, 3000);
  const std::int64_t all = plan_memory(model, with_budget(kUnlimited), 1).memory_bytes();
  for (const int num_ranks : {1, 2}) {
    const MemoryPlan placement = plan_memory(model, with_budget(all / 6 * num_ranks, num_ranks), 1);
    for (const std::vector<int>& unit : model.units) {
      std::int64_t gathered = 0;
      for (const int id : unit) {
        const auto i = static_cast<std::size_t>(id);
        const bool is_stored = placement.params[i].parameter == Tier::kNvme;
        gathered += num_ranks > 1 || is_stored ? 4 * model.params[i].numel : 0;
      }
      EXPECT_GE(placement.arena_bytes, gathered);
    }
    EXPECT_EQ(placement.live_limit_bytes, placement.arena_bytes);
  }
  // Alone and with all parameters in memory, nothing is gathered.
  EXPECT_EQ(plan_memory(model, with_budget(all * 3 / 4), 1).arena_bytes, 0);
}

TEST(MemoryPlanner, BuffersHoldTheLargestSubGroupAsOftenAsThereAreBuffers) {
  for (const ModelShapes& model : small_models()) {
    const std::int64_t all = plan_memory(model, with_budget(kUnlimited), 1).memory_bytes();
    for (const std::int64_t part : {30, 50, 80}) {
      const std::int64_t budget = all * part / 100 + (std::int64_t{1} << 20);
      const MemoryPlan placement = plan_memory(model, with_budget(budget), 1);
      if (!placement.uses_nvme) {
        continue;
      }
      std::vector<optim::SubGroupParam> params;
      for (std::size_t i = 0; i < model.params.size(); ++i) {
        const shard::Layout layout(model.params[i].numel, 1, model.dtype);
        params.push_back({layout.shard_numel(), model.dtype, model.params[i].trainable,
                          placement.params[i]});
      }
      const auto plan = optim::plan_sub_groups(params, placement.sub_group_numel, 2);
      EXPECT_EQ(placement.optimizer_pool_bytes,
                placement.num_optimizer_buffers * static_cast<std::int64_t>(plan.max_lease_bytes));
      EXPECT_EQ(placement.bytes(Tier::kNvme, Role::kOptimizer),
                static_cast<std::int64_t>(plan.nvme_states_bytes));
    }
  }
}

// 8 bytes of states, the parameter itself as their master, and gradients.
TEST(MemoryPlanner, CountsWhatAStepMovesPerElement) {
  const std::int64_t numel = std::int64_t{1} << 20;
  ModelMaker maker;
  for (int i = 0; i < 8; ++i) {
    maker.unit("u" + std::to_string(i), {numel});
  }
  MemoryPlanOptions options = with_budget(std::int64_t{9} << 20);
  const MemoryPlan placement = plan_memory(maker.make(), options, 3);
  const std::int64_t all = 8 * numel;
  ASSERT_EQ(placement.bytes(Tier::kNvme, Role::kShard), 4 * all);
  EXPECT_EQ(placement.step.states_read, 12 * all);
  EXPECT_EQ(placement.step.states_written, 12 * all);
  EXPECT_EQ(placement.step.parameters_written, 0);
  EXPECT_EQ(placement.step.parameters_read, 3 * 2 * 4 * all);
  EXPECT_EQ(placement.step.gradients_written, 3 * 4 * all);
  EXPECT_EQ(placement.step.gradients_read, (2 + 1) * 4 * all);
  EXPECT_EQ(placement.full_gradient_bytes, 4 * numel);
  // For the norm of stored gradients, one number per block of a shard stays in memory.
  ASSERT_EQ(placement.bytes(Tier::kNvme, Role::kGradient), 4 * all);
  EXPECT_EQ(placement.bytes(Tier::kHost, Role::kGradient),
            static_cast<std::int64_t>(grad::taken_bytes(
                8 * static_cast<std::size_t>(grad::num_norm_blocks(numel)) * sizeof(double))));
}

TEST(MemoryPlanner, CountsAMasterAmongTheStatesOfLowPrecision) {
  const std::int64_t numel = std::int64_t{1} << 20;
  ModelMaker maker(DType::kBFloat16);
  for (int i = 0; i < 8; ++i) {
    maker.unit("u" + std::to_string(i), {numel});
  }
  const MemoryPlan placement = plan_memory(maker.make(), with_budget(std::int64_t{5} << 20), 1);
  const std::int64_t all = 8 * numel;
  ASSERT_EQ(placement.bytes(Tier::kNvme, Role::kShard), 2 * all);
  EXPECT_EQ(placement.bytes(Tier::kNvme, Role::kOptimizer), 12 * all);
  EXPECT_EQ(placement.step.states_read, 12 * all);
  EXPECT_EQ(placement.step.states_written, 12 * all);
  EXPECT_EQ(placement.step.parameters_written, 2 * all);
}

TEST(MemoryPlanner, ExtentsFollowEachOtherAndAreWhatTheLedgerSays) {
  for (const ModelShapes& model : small_models()) {
    MemoryPlanOptions options = with_budget(kUnlimited, 2);
    options.parameters = Tier::kNvme;
    options.optimizer = Tier::kNvme;
    options.parameters_host_bytes = 0;
    const MemoryPlan placement = plan_memory(model, options, 1);
    std::int64_t ends[kNumRoles] = {};
    for (const PlannedExtent& extent :
         planned_extents(model, options, placement, {"exp_avg", "exp_avg_sq"})) {
      std::int64_t& end = ends[static_cast<std::size_t>(extent.role)];
      EXPECT_EQ(extent.offset, end);
      EXPECT_EQ(extent.bytes, whole_blocks_of(extent.bytes));
      EXPECT_GT(extent.bytes, 0);
      end += extent.bytes;
    }
    for (const Role role : {Role::kShard, Role::kGradient, Role::kOptimizer}) {
      EXPECT_EQ(ends[static_cast<std::size_t>(role)], placement.bytes(Tier::kNvme, role));
    }
  }
}

TEST(MemoryPlanner, ChecksumsAreCountedWhereTheyAreKept) {
  const ModelShapes model = small_gpt(64, 4, 3000);
  MemoryPlanOptions options = with_budget(std::int64_t{4} << 20);
  options.verify = true;
  const MemoryPlan placement = plan_memory(model, options, 1);
  ASSERT_TRUE(placement.uses_nvme);
  EXPECT_EQ(placement.bytes(Tier::kHost, Role::kOther), placement.bytes(Tier::kNvme) / 4096 * 8);
  EXPECT_LE(placement.memory_bytes(), options.host_bytes);
}

}  // namespace
}  // namespace tessera::planner
