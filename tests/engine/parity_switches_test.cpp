// What must not change a bit, what must be found, and half precision.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"

namespace tessera::testing {
namespace {

TEST(Switches, OfBucketPrefetchPersistenceAndLimitChangeNoBit) {
  const Options variants[] = {
      {{"grad.bucket_bytes", "1KiB"}},
      {{"grad.bucket_bytes", "100000"}},
      {{"prefetch.bucket_bytes", "0"}},
      {{"prefetch.bucket_bytes", "64KiB"}, {"prefetch.max_inflight", "1"}},
      {{"persist.param_bytes", "0"}},
      {{"persist.param_bytes", "unlimited"}},
      {{"live.limit_bytes", "0"}},
      {{"live.limit_bytes", "500KiB"}, {"live.reuse_distance_bytes", "0"}},
      {{"live.reuse_distance_bytes", "0"},
       {"persist.param_bytes", "0"},
       {"live.limit_bytes", "1MiB"}},
      {{"comm.pack_below_bytes", "0"}},
  };
  for (const int ranks : {2, 3}) {
    RunSettings settings;
    settings.model = models::gpt_preset("micro");
    settings.steps = 6;
    settings.ranks = ranks;
    settings.accumulate = 2;
    const RunOutcome base = train(settings);
    for (const Options& variant : variants) {
      settings.options = variant;
      const RunOutcome changed = train(settings);
      EXPECT_TRUE(same_bits(changed, base))
          << ranks << " ranks, " << variant[0].first << "=" << variant[0].second << ": "
          << difference(changed, base).describe();
    }
  }
}

TEST(PlantedBugs, AreFoundByTheComparison) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.steps = 6;
  settings.accumulate = 2;
  settings.ranks = 0;
  const RunOutcome referee = train(settings);
  settings.ranks = 2;
  EXPECT_LE(difference(train(settings), referee).largest(), 2e-6);
  for (const Planted planted : {Planted::kDoubledGradient, Planted::kParamNotUpdated,
                                Planted::kSumForMean, Planted::kStaleGradient}) {
    settings.planted = planted;
    const Difference off = difference(train(settings), referee);
    // Ten times the bound: a check that fails by a hair would be luck.
    EXPECT_GT(off.largest(), 2e-5)
        << "bug " << static_cast<int>(planted) << " was not found: " << off.describe();
  }
}

// Ranks round their own gradients to the type of the parameters where the referee rounds those of
// the whole batch. A gradient that reaches a parameter has passed through about k = 16 roundings of
// relative size u in each block, so the two differ by e = sqrt(16 * layers) * u of their size, if
// roundings are independent. AdamW's steps do not depend on the size of a gradient but on its sign:
// two runs step apart, by 2 * lr, where a gradient is smaller than the difference, which for about
// normal values is a fraction e of the elements, and by lr * e elsewhere. After n steps the
// difference of n * 2 * lr * sqrt(e) per root of an element stands against a weight of about 1 /
// sqrt(3 * width) (uniform within 1 / sqrt(width)); norms' weights are larger, and their biases,
// which start at zero, have moved by about n * lr. The factor 2 * sqrt(e) therefore bounds them
// all. Norms and losses are means over all elements, in which signs do not matter: e bounds them.
double relative_gradient_error(double unit, std::int64_t layers) {
  return std::sqrt(16.0 * static_cast<double>(layers)) * unit;
}

struct Precision {
  const char* name;
  DType dtype;
  double unit;  // half of the distance between neighbours, relative
};

class LowPrecision : public ::testing::TestWithParam<Precision> {};

TEST_P(LowPrecision, AgreesWithTheRefereeToADerivedBound) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = GetParam().dtype;
  settings.model.sequence = 16;  // products of low precision are slow on most CPUs
  settings.steps = 8;
  settings.accumulate = 2;
  settings.ranks = 0;
  const RunOutcome referee = train(settings);
  EXPECT_LT(referee.steps.back().loss, referee.steps.front().loss);
  for (int ranks = 1; ranks <= 3; ++ranks) {
    settings.ranks = ranks;
    const RunOutcome sharded = train(settings);
    const Difference off = difference(sharded, referee);
    if (ranks == 1) {
      EXPECT_TRUE(same_bits(sharded, referee)) << off.describe();
    }
    const double error = relative_gradient_error(GetParam().unit, settings.model.layers);
    EXPECT_LE(off.param, 2 * std::sqrt(error)) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.loss, error) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.norm, error) << ranks << " ranks: " << off.describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Types, LowPrecision,
                         ::testing::Values(Precision{"bf16", DType::kBFloat16, 0x1p-9},
                                           Precision{"fp16", DType::kFloat16, 0x1p-12}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::testing
