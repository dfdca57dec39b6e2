// From sums to factors: tables.
#include "tessera/optim/clip.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(StepFactors, AreThoseOfTheTable) {
  struct Row {
    double squares, weight, loss_scale, clip_norm;
    double norm, gradient_scale;
  };
  const Row rows[] = {
      // No clipping: weight and loss scale are taken out, exactly.
      {25, 1, 1, 0, 5, 1},
      {25, 4, 1, 0, 1.25, 0.25},
      {25, 1, 65536, 0, 5 / 65536.0, 1 / 65536.0},
      {25, 4, 2, 0, 0.625, 0.125},
      {0, 3, 1, 0, 0, 1 / 3.0},
      // Below the limit nothing changes; at the limit the 1e-6 shows, as it does in torch.
      {25, 1, 1, 6, 5, 1},
      {25, 1, 1, 5, 5, 5 / (5 + 1e-6)},
      {25, 1, 1, 1, 5, 1 / (5 + 1e-6)},
      // The limit holds for the mean gradient.
      {25, 4, 2, 0.5, 0.625, 0.125 * (0.5 / (0.625 + 1e-6))},
      {0, 1, 1, 1, 0, 1},
  };
  for (const Row& row : rows) {
    StepSums sums;
    sums.gradient_squares = row.squares;
    sums.weight = row.weight;
    sums.weighted_loss = 3 * row.weight;
    const StepFactors factors = step_factors(sums, row.loss_scale, row.clip_norm);
    EXPECT_TRUE(factors.finite);
    EXPECT_EQ(factors.grad_norm, row.norm);
    EXPECT_EQ(factors.gradient_scale, row.gradient_scale);
    EXPECT_EQ(factors.loss, 3);
  }
}

TEST(StepFactors, ShowANonFiniteNormAsItCame) {
  for (const double clip_norm : {0.0, 1.0}) {
    StepSums sums;
    sums.weight = 2;
    sums.gradient_squares = kInfinity;
    StepFactors factors = step_factors(sums, 1, clip_norm);
    EXPECT_FALSE(factors.finite);
    EXPECT_EQ(factors.grad_norm, kInfinity);
    EXPECT_EQ(factors.gradient_scale, 0.5);  // not zero: the update would hide what happened
    sums.gradient_squares = kNan;
    factors = step_factors(sums, 1, clip_norm);
    EXPECT_FALSE(factors.finite);
    EXPECT_TRUE(std::isnan(factors.grad_norm));
    EXPECT_EQ(factors.gradient_scale, 0.5);
  }
}

TEST(StepFactors, NeedAPositiveWeight) {
  for (const double weight : {0.0, -1.0, kNan, kInfinity}) {
    StepSums sums;
    sums.weight = weight;
    EXPECT_THROW(step_factors(sums, 1, 0), ConfigError) << weight;
  }
}

}  // namespace
}  // namespace tessera::optim
