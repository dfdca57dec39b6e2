// Sharded training against the referee: losses, norms of every step, and parameters after the last.
//
// The bound of 2e-6 is the project's promise for fp32 between numbers of ranks. One rank has the
// same bits.
#include <gtest/gtest.h>

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
  const RunOutcome referee = train(settings);
  EXPECT_LT(referee.steps.back().loss, referee.steps.front().loss * 0.8) << "nothing was learned";
  for (const int ranks : GetParam().ranks) {
    settings.ranks = ranks;
    const RunOutcome sharded = train(settings);
    const Difference off = difference(sharded, referee);
    EXPECT_LE(off.largest(), kBound) << ranks << " ranks: " << off.describe();
    // Two noises, each at most a step of AdamW's largest size, lr, apart in every step.
    EXPECT_LE(off.noise, 2 * 1e-3 * static_cast<double>(settings.steps));
    if (ranks == 1) {
      EXPECT_TRUE(same_bits(sharded, referee)) << off.describe();
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

}  // namespace
}  // namespace tessera::testing
