// What must not change a bit, what must be found, and half precision.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/engine/training_run.h"

namespace tessera::testing {
namespace {

using Options = std::vector<std::pair<std::string, std::string>>;

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

// Between numbers of ranks only the order of sums of gradients differs: each gradient is rounded to
// the type on the wire once per rank and micro-batch (relative error at most 2^-9 for bf16, 2^-12
// for fp16, half a unit in the last place), and activations are the same as long as the parameters
// are. AdamW moves a weight by at most lr per step whatever the gradient's size, and two gradients
// that differ by a fraction e of their norm lead to steps that differ by about lr * e where the
// gradient is larger than its noise, and by at most 2 * lr where it is not. The bound on parameters
// is therefore steps * 2 * lr * sqrt(numel) / |w| for the fraction of noisy elements, taken here as
// a whole for fp16's and bf16's unit: lr * steps * sqrt(unit) relative to a weight scale of 0.02.
double low_precision_bound(double unit, std::int64_t steps, double lr) {
  return static_cast<double>(steps) * lr / 0.02 * std::sqrt(unit);
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
  settings.steps = 10;
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
    const double bound = low_precision_bound(GetParam().unit, settings.steps, 1e-3);
    EXPECT_LE(off.param, bound) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.loss, 4 * GetParam().unit) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.norm, bound) << ranks << " ranks: " << off.describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Types, LowPrecision,
                         ::testing::Values(Precision{"bf16", DType::kBFloat16, 0x1p-9},
                                           Precision{"fp16", DType::kFloat16, 0x1p-12}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::testing
