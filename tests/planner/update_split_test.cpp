// The share of the CPU at which it and the device end together.
#include "tessera/planner/update_split.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

// 1.4 billion elements in host memory, beside one GPU and 14 threads.
class UpdateSplit : public testing::Test {
 protected:
  // Of the measured rates, as `change` has them.
  double share(const std::function<void(UpdateRates&)>& change = [](UpdateRates&) {}) const {
    UpdateRates rates = kMeasured;
    change(rates);
    return choose_cpu_share(rates, model_, options_);
  }

  static constexpr UpdateRates kMeasured{62.3e9, 48.8e9, 48.8e9};  // copies running both ways
  const ModelShapes model_ = small_gpt(2048, 24, 50304, DType::kBFloat16);
  MemoryPlanOptions options_ = in_host();
};

TEST_F(UpdateSplit, MeasuredRatesGiveTheShareOfTheBounds) {
  EXPECT_GT(share(), 0.3);
  EXPECT_LT(share(), 0.42);
}

// A model that slots hold almost nothing of: the closed form.
TEST_F(UpdateSplit, BothEndAtTheSameTime) {
  options_.sub_group_bytes = 8192;
  const double cpu_s = 28 * share() / kMeasured.cpu_bytes_per_s;
  // States and new values of the device's share: more than what is copied H2D.
  EXPECT_NEAR(cpu_s / (14 * (1 - share()) / kMeasured.d2h_bytes_per_s), 1, 0.001);
  const double other = share([](UpdateRates& rates) { rates.d2h_bytes_per_s *= 2; });
  const double h2d_s = (12 * (1 - other) + 2 * other) / kMeasured.h2d_bytes_per_s;
  EXPECT_NEAR(28 * other / kMeasured.cpu_bytes_per_s / h2d_s, 1, 0.001);
}

TEST_F(UpdateSplit, AFasterCpuGetsMoreAndAFasterLinkLess) {
  EXPECT_GT(share([](UpdateRates& rates) { rates.cpu_bytes_per_s *= 1.5; }), share());
  EXPECT_GT(share([](UpdateRates& rates) { rates.d2h_bytes_per_s /= 2; }), share());
  EXPECT_LT(share([](UpdateRates& rates) {
              rates.h2d_bytes_per_s *= 1.5;
              rates.d2h_bytes_per_s *= 1.5;
            }),
            share());
}

TEST_F(UpdateSplit, ALongBackwardLetsMoreBeCopiedAhead) {
  const auto with_backward = [this](double backward_s, double d2h, double h2d_alone = 0) {
    return share([&](UpdateRates& rates) {
      rates.backward_s = backward_s;
      rates.d2h_bytes_per_s *= d2h;
      rates.h2d_alone_bytes_per_s = h2d_alone * rates.h2d_bytes_per_s;
    });
  };
  const double any = with_backward(0, 2);
  EXPECT_GT(with_backward(0.001, 2), any);
  const double good = with_backward(0.08, 2);
  EXPECT_LT(good, any);
  EXPECT_LE(with_backward(0.08, 2, 1.1), good);
  // D2H is the bound, whatever is copied ahead.
  EXPECT_NEAR(with_backward(0.08, 1, 1.1), share(), 0.01);
}

// The device's share takes 26 bytes of the host's memory per element, the CPU's 30.
TEST_F(UpdateSplit, NarrowMemoryOfTheHostGivesMoreToTheDevice) {
  options_.sub_group_bytes = 8192;
  const auto within = [this](double host_bytes_per_s) {
    return share([=](UpdateRates& rates) { rates.host_bytes_per_s = host_bytes_per_s; });
  };
  EXPECT_EQ(within(1e12), share());
  const double narrow = within(100e9);
  EXPECT_LT(narrow, share());
  const double all_s = (30 * narrow + 26 * (1 - narrow)) / 100e9;
  EXPECT_NEAR(all_s / (14 * (1 - narrow) / kMeasured.d2h_bytes_per_s), 1, 0.001);
  // All of it is the device's if even so the link has time left.
  EXPECT_NEAR(within(10e9), 0, 1e-6);
}

// The head is the last shard, and 7 % of all. What is too much on one side is less than any shard
// that could go to the other.
TEST_F(UpdateSplit, ALargeShardAtTheEndDoesNotSpoilTheShare) {
  for (int percent = 2; percent < 90; percent += 3) {
    options_.cpu_share = percent / 100.0;
    const MemoryPlan plan = planned(model_, options_);
    std::int64_t num_cpu = 0;
    std::int64_t num_all = 0;
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const Placement& each = plan.params[i];
      EXPECT_EQ(each.gradient, device_updates(each) ? Tier::kDevice : Tier::kHost);
      if (each.states == Tier::kHost) {
        num_all += model_.params[i].numel;
        num_cpu += device_updates(each) ? 0 : model_.params[i].numel;
      }
    }
    EXPECT_DOUBLE_EQ(plan.cpu_share, static_cast<double>(num_cpu) / static_cast<double>(num_all));
    const double excess =
        static_cast<double>(num_cpu) - options_.cpu_share * static_cast<double>(num_all);
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const Placement& each = plan.params[i];
      if (each.states == Tier::kHost && device_updates(each) == (excess < 0)) {
        EXPECT_GT(static_cast<double>(model_.params[i].numel), std::abs(excess)) << percent;
      }
    }
  }
}

// The device gets them by the link, behind its states; the CPU reads them where they are.
TEST_F(UpdateSplit, GradientsOfSeveralMicroBatchesCountOnBothSides) {
  options_.sub_group_bytes = 8192;
  for (const std::int64_t num_micro_batches : {2, 4, 8}) {
    const double found = choose_cpu_share(kMeasured, model_, options_, num_micro_batches);
    // The sum of all but the last in fp32, and the last; or both.
    const auto copies = 2.0 * static_cast<double>(std::min<std::int64_t>(num_micro_batches, 3));
    const double cpu_s = (26 + copies) * found / kMeasured.cpu_bytes_per_s;
    const double h2d_s = ((12 + copies) * (1 - found) + 2) / kMeasured.h2d_bytes_per_s;
    const double d2h_s = 14 * (1 - found) / kMeasured.d2h_bytes_per_s;
    EXPECT_NEAR(cpu_s / std::max(h2d_s, d2h_s), 1, 0.001) << num_micro_batches;
    EXPECT_GT(found, share()) << num_micro_batches;
  }
}

TEST_F(UpdateSplit, WhoeverNeedsNoTimeDoesEverything) {
  EXPECT_NEAR(share([](UpdateRates& rates) { rates.cpu_bytes_per_s = 1; }), 0, 1e-6);
  EXPECT_EQ(share([](UpdateRates& rates) { rates.h2d_bytes_per_s = 1; }), 1);
  EXPECT_EQ(choose_cpu_share(kMeasured, large_gpt(), on_gpu()), 0) << "no states in host memory";
}

// Rates are a rank's, while all ranks work: half the elements in half the time.
TEST_F(UpdateSplit, OfSeveralRanksGoesByThePartOfEach) {
  const ModelShapes model = large_gpt(DType::kFloat32);  // copied again whoever updates it
  options_.sub_group_bytes = 8192;
  for (const double backward_s : {0.0, 0.001, 0.002}) {
    UpdateRates rates = kMeasured;
    rates.d2h_bytes_per_s *= 4;  // so that H2D is the bound
    rates.backward_s = backward_s;
    options_.num_ranks = 1;
    EXPECT_TRUE(splits_update(options_));
    const double one = choose_cpu_share(rates, model, options_);
    rates.backward_s = backward_s / 2;
    options_.num_ranks = 2;
    EXPECT_TRUE(splits_update(options_));
    EXPECT_NEAR(choose_cpu_share(rates, model, options_), one, 0.01) << backward_s;
  }
}

}  // namespace
}  // namespace tessera::planner
