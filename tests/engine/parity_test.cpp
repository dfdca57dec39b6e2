// Sharded training against the reference: losses, norms of every step, and parameters after the
// last. One rank has the same bits.
#include <gtest/gtest.h>

#include "tests/engine/rounding_bounds.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"

namespace tessera::testing {
namespace {

struct ParityCase {
  const char* name;
  std::vector<int> ranks;
  void (*change)(RunSettings&);
};

class Parity : public ::testing::TestWithParam<ParityCase> {};

TEST_P(Parity, HoldsForEveryNumberOfRanks) {
  RunSettings settings;
  settings.ranks = 0;
  settings.steps = 12;
  GetParam().change(settings);
  const RunOutcome reference = train(settings);
  EXPECT_LT(reference.steps.back().loss, reference.steps.front().loss * 0.8)
      << "nothing was learned";
  for (const int ranks : GetParam().ranks) {
    settings.ranks = ranks;
    const RunOutcome sharded = train(settings);
    const Difference off = difference(sharded, reference);
    EXPECT_LE(off.largest(), parity_bounds(settings.model).step)
        << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.noise, noise_bound(settings.steps));
    if (ranks == 1) {
      EXPECT_TRUE(same_bits(sharded, reference)) << off.describe();
    } else {
      EXPECT_FALSE(off.largest() == 0) << "a comparison of a run with itself proves nothing";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpt, Parity,
    ::testing::Values(
        ParityCase{"Ranks", {1, 2, 3, 4}, [](RunSettings&) {}},
        ParityCase{"Accumulated",
                   {1, 3},
                   [](RunSettings& settings) {
                     settings.batch = 24;
                     settings.accumulate = 2;
                   }},
        ParityCase{
            "Recomputed", {1, 2}, [](RunSettings& settings) { settings.model.recompute = true; }},
        ParityCase{"Tied", {1, 2}, [](RunSettings& settings) { settings.model.tie_head = true; }},
        ParityCase{"Frozen", {1, 3}, [](RunSettings& settings) { settings.model.freeze = 1; }},
        ParityCase{"OddVocabulary",
                   {1, 4},
                   [](RunSettings& settings) { settings.model.vocabulary = 257; }},
        ParityCase{"Small",
                   {1, 3},
                   [](RunSettings& settings) {
                     settings.model = models::gpt_preset("small");
                     settings.model.sequence =
                         16;  // 20 steps in seconds, with the preset's parameters
                   }},
        ParityCase{"Everything",
                   {1, 2, 3, 4},
                   [](RunSettings& settings) {
                     settings.batch = 24;
                     settings.accumulate = 2;
                     settings.model.recompute = true;
                     settings.model.tie_head = true;
                     settings.model.freeze = 1;
                     settings.model.vocabulary = 257;
                   }}),
    [](const auto& info) { return std::string(info.param.name); });

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
  const RunOutcome reference = train(settings);
  settings.ranks = 2;
  EXPECT_LE(difference(train(settings), reference).largest(), 2e-6);
  for (const Planted planted : {Planted::kDoubledGradient, Planted::kParamNotUpdated,
                                Planted::kSumForMean, Planted::kStaleGradient}) {
    settings.planted = planted;
    const Difference off = difference(train(settings), reference);
    // Ten times the bound: a check that fails by a hair would be luck.
    EXPECT_GT(off.largest(), 2e-5)
        << "bug " << static_cast<int>(planted) << " was not found: " << off.describe();
  }
}

class LowPrecision : public ::testing::TestWithParam<DType> {};

TEST_P(LowPrecision, AgreesWithTheReferenceToADerivedBound) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = GetParam();
  settings.model.sequence = 16;  // products of low precision are slow on most CPUs
  settings.steps = 8;
  settings.accumulate = 2;
  settings.ranks = 0;
  const RunOutcome reference = train(settings);
  EXPECT_LT(reference.steps.back().loss, reference.steps.front().loss);
  for (int ranks = 1; ranks <= 3; ++ranks) {
    settings.ranks = ranks;
    const RunOutcome sharded = train(settings);
    const Difference off = difference(sharded, reference);
    if (ranks == 1) {
      EXPECT_TRUE(same_bits(sharded, reference)) << off.describe();
    }
    const ParityBounds bounds = parity_bounds(settings.model);
    EXPECT_LE(off.param, bounds.param) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.loss, bounds.step) << ranks << " ranks: " << off.describe();
    EXPECT_LE(off.norm, bounds.step) << ranks << " ranks: " << off.describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Types, LowPrecision, ::testing::Values(DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace tessera::testing
