// Sharded training against the reference: losses, norms of every step, and parameters after the
// last.
//
// The bound of 2e-6 is the project's promise for fp32 between numbers of ranks. One rank has the
// same bits.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"

namespace tessera::testing {
namespace {

constexpr double kBound = 2e-6;

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
    EXPECT_LE(off.largest(), kBound) << ranks << " ranks: " << off.describe();
    // Two noises, each at most a step of AdamW's largest size, lr, apart in every step.
    EXPECT_LE(off.noise, 2 * 1e-3 * static_cast<double>(settings.steps));
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

// Ranks round their own gradients to the type of the parameters where the reference rounds those of
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

TEST_P(LowPrecision, AgreesWithTheReferenceToADerivedBound) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = GetParam().dtype;
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
