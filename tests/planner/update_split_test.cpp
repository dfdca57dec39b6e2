// The share of the CPU at which it and the device end together.
#include "tessera/planner/update_split.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

// One GPU with 14 threads beside it, copies running both ways.
UpdateRates measured() { return {62.3e9, 48.8e9, 48.8e9}; }

// 1.4 billion elements.
ModelShapes gpt_1b4() { return small_gpt(2048, 24, 50304, DType::kBFloat16); }

TEST(UpdateSplit, MeasuredRatesGiveTheShareOfTheBounds) {
  const double share = choose_cpu_share(measured(), gpt_1b4(), in_host());
  EXPECT_GT(share, 0.3);
  EXPECT_LT(share, 0.42);
}

// A model that slots hold almost nothing of: the closed form.
TEST(UpdateSplit, BothEndAtTheSameTime) {
  const ModelShapes model = gpt_1b4();
  MemoryPlanOptions options = in_host();
  options.sub_group_bytes = 8192;
  const UpdateRates rates = measured();
  const double share = choose_cpu_share(rates, model, options);
  const double cpu = 28 * share / rates.cpu_bytes_per_s;
  // States and new values of the device's share: more than what comes up.
  const double down = 14 * (1 - share) / rates.d2h_bytes_per_s;
  EXPECT_NEAR(cpu / down, 1, 0.001);
  UpdateRates faster_down = rates;
  faster_down.d2h_bytes_per_s *= 2;
  const double other = choose_cpu_share(faster_down, model, options);
  const double up = (12 * (1 - other) + 2 * other) / rates.h2d_bytes_per_s;
  EXPECT_NEAR(28 * other / rates.cpu_bytes_per_s / up, 1, 0.001);
}

TEST(UpdateSplit, AFasterCpuGetsMoreAndAFasterLinkLess) {
  const ModelShapes model = gpt_1b4();
  const MemoryPlanOptions options = in_host();
  const double share = choose_cpu_share(measured(), model, options);
  UpdateRates rates = measured();
  rates.cpu_bytes_per_s *= 1.5;
  EXPECT_GT(choose_cpu_share(rates, model, options), share);
  rates = measured();
  rates.h2d_bytes_per_s *= 1.5;
  rates.d2h_bytes_per_s *= 1.5;
  EXPECT_LT(choose_cpu_share(rates, model, options), share);
  // Down is the narrow way now.
  rates = measured();
  rates.d2h_bytes_per_s /= 2;
  EXPECT_GT(choose_cpu_share(rates, model, options), share);
}

TEST(UpdateSplit, ALongBackwardLetsMoreComeUpAhead) {
  const ModelShapes model = gpt_1b4();
  const MemoryPlanOptions options = in_host();
  UpdateRates rates = measured();
  const double narrow_down = choose_cpu_share(rates, model, options);
  rates.d2h_bytes_per_s *= 2;
  const double any = choose_cpu_share(rates, model, options);
  rates.backward_s = 0.001;
  EXPECT_GT(choose_cpu_share(rates, model, options), any);
  rates.backward_s = 0.08;
  const double good = choose_cpu_share(rates, model, options);
  EXPECT_LT(good, any);
  rates.h2d_alone_bytes_per_s = 1.1 * rates.h2d_bytes_per_s;
  EXPECT_LE(choose_cpu_share(rates, model, options), good);
  // What goes down is the bound, whatever comes up ahead.
  rates.d2h_bytes_per_s /= 2;
  EXPECT_NEAR(choose_cpu_share(rates, model, options), narrow_down, 0.01);
}

// The device's share takes 26 bytes of the host's memory per element, the CPU's 30.
TEST(UpdateSplit, NarrowMemoryOfTheHostGivesMoreToTheDevice) {
  const ModelShapes model = gpt_1b4();
  MemoryPlanOptions options = in_host();
  options.sub_group_bytes = 8192;
  UpdateRates rates = measured();
  const double any = choose_cpu_share(rates, model, options);
  rates.host_bytes_per_s = 1e12;
  EXPECT_EQ(choose_cpu_share(rates, model, options), any);
  rates.host_bytes_per_s = 100e9;
  const double share = choose_cpu_share(rates, model, options);
  EXPECT_LT(share, any);
  const double all = (30 * share + 26 * (1 - share)) / rates.host_bytes_per_s;
  EXPECT_NEAR(all / (14 * (1 - share) / rates.d2h_bytes_per_s), 1, 0.001);
  // All of it is the device's if even so the link has time left.
  rates.host_bytes_per_s = 10e9;
  EXPECT_NEAR(choose_cpu_share(rates, model, options), 0, 1e-6);
}

// The head is the last shard, and 7 % of all. What is too much on one side is less than any shard
// that could go to the other.
TEST(UpdateSplit, ALargeShardAtTheEndDoesNotSpoilTheShare) {
  const ModelShapes model = gpt_1b4();
  MemoryPlanOptions options = in_host();
  for (int percent = 2; percent < 90; percent += 3) {
    options.cpu_share = percent / 100.0;
    const MemoryPlan plan = planned(model, options);
    std::int64_t num_cpu = 0;
    std::int64_t num_all = 0;
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const Placement& each = plan.params[i];
      EXPECT_EQ(each.gradient, device_updates(each) ? Tier::kDevice : Tier::kHost);
      if (each.states == Tier::kHost) {
        num_all += model.params[i].numel;
        num_cpu += device_updates(each) ? 0 : model.params[i].numel;
      }
    }
    EXPECT_DOUBLE_EQ(plan.cpu_share, static_cast<double>(num_cpu) / static_cast<double>(num_all));
    const double excess =
        static_cast<double>(num_cpu) - options.cpu_share * static_cast<double>(num_all);
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const Placement& each = plan.params[i];
      if (each.states == Tier::kHost && device_updates(each) == (excess < 0)) {
        EXPECT_GT(static_cast<double>(model.params[i].numel), std::abs(excess)) << percent;
      }
    }
  }
}

TEST(UpdateSplit, WhereStatesAreNotInHostMemoryThereIsNothingToSplit) {
  EXPECT_EQ(choose_cpu_share(measured(), large_gpt(), on_gpu()), 0);
}

TEST(UpdateSplit, ADeviceThatNeedsNoTimeAtAllDoesEverything) {
  UpdateRates rates = measured();
  rates.cpu_bytes_per_s = 1;
  EXPECT_NEAR(choose_cpu_share(rates, gpt_1b4(), in_host()), 0, 1e-6);
  rates = measured();
  rates.h2d_bytes_per_s = 1;
  EXPECT_EQ(choose_cpu_share(rates, gpt_1b4(), in_host()), 1);
}

TEST(UpdateSplit, SeveralRanksMeasureNothingSoThatTheyPlanAlike) {
  MemoryPlanOptions options = in_host();
  EXPECT_TRUE(splits_update(options));
  options.num_ranks = 2;
  EXPECT_FALSE(splits_update(options));
}

}  // namespace
}  // namespace tessera::planner
