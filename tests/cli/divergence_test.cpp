#include "cli/divergence.h"

#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Step {
  double loss = 4;
  double grad_norm = 1;
  bool skipped = false;
  double loss_scale = 1;
};

Divergence after(const std::vector<Step>& steps) {
  Divergence divergence;
  std::int64_t number = 1;
  for (const Step& step : steps) {
    StepMetrics metrics;
    metrics.step = number++;
    metrics.loss = step.loss;
    metrics.grad_norm = step.grad_norm;
    metrics.skipped = step.skipped;
    metrics.loss_scale = step.loss_scale;
    divergence.add(metrics);
  }
  return divergence;
}

const Step kGood{};
const Step kSkipped{.grad_norm = kInfinite, .skipped = true};

TEST(Divergence, AFiniteRunHasNone) {
  EXPECT_FALSE(after({}).has_diverged());
  EXPECT_FALSE(after({kGood, kGood}).has_diverged());
  EXPECT_FALSE(after({kGood, kSkipped, kGood}).has_diverged());
}

TEST(Divergence, TheLastLossDecides) {
  const Step lost{.loss = kNan, .grad_norm = kNan, .skipped = true};
  EXPECT_TRUE(after({kGood, kGood, kGood, lost}).has_diverged());
  EXPECT_FALSE(after({kGood, kGood, lost, kGood}).has_diverged());
  EXPECT_TRUE(after({kGood, kGood, {.loss = kInfinite}}).has_diverged());
}

TEST(Divergence, MoreThanHalfOfTheStepsLostIsOne) {
  EXPECT_FALSE(after({kSkipped, kGood}).has_diverged());
  EXPECT_TRUE(after({kSkipped, kSkipped, kGood}).has_diverged());
}

TEST(Divergence, TenLostInARowAreGoingOn) {
  std::vector<Step> steps(100, kGood);
  steps.insert(steps.end(), 9, kSkipped);
  EXPECT_FALSE(after(steps).is_going_on());
  EXPECT_FALSE(after(steps).has_diverged());
  steps.push_back(kSkipped);
  EXPECT_TRUE(after(steps).is_going_on());
  EXPECT_TRUE(after(steps).has_diverged());
  EXPECT_HAS(after(steps).text(DType::kFloat32), "10 of 110 steps");
  steps.push_back(kGood);
  EXPECT_FALSE(after(steps).is_going_on());
}

TEST(Divergence, ALossScaleMayLookForItsValue) {
  std::vector<Step> steps;
  for (int scale = 65536; scale > 1; scale /= 2) {
    steps.push_back(
        {.grad_norm = kInfinite, .skipped = true, .loss_scale = static_cast<double>(scale)});
  }
  EXPECT_FALSE(after(steps).has_diverged());
  // At its end it looks for nothing any more.
  steps.insert(steps.end(), 10, kSkipped);
  EXPECT_TRUE(after(steps).is_going_on());
  // A loss that is not finite is no matter of scales.
  EXPECT_TRUE(after({{.loss = kNan, .skipped = true, .loss_scale = 65536}}).has_diverged());
}

TEST(Divergence, SaysWhatToTry) {
  const Divergence lost = after({{.loss = kNan}});
  EXPECT_LACKS(lost.text(DType::kFloat32), "--precision");
  EXPECT_HAS(lost.text(DType::kFloat16), "--precision fp32");
}

TEST(Divergence, AnUpdateWithWhatIsNotFiniteSpoilsParameters) {
  EXPECT_FALSE(after({kGood, kSkipped}).has_spoilt_parameters());
  const Divergence spoilt = after({kGood, {.grad_norm = kNan}, {.loss = kNan, .grad_norm = kNan}});
  EXPECT_TRUE(spoilt.has_spoilt_parameters());
  EXPECT_HAS(spoilt.text(DType::kFloat32), "not finite since step 2");
}

}  // namespace
}  // namespace tessera::cli
