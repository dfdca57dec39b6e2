#include "tessera/coordinator/prefetch_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tests/coordinator/plan_simulator.h"

namespace tessera::coordinator {
namespace {

constexpr std::int64_t kPlannedLayerBytes = 1000;
constexpr std::int64_t kUnlimited = kUnlimitedBytes;

// What a PlanInput points to.
struct Case {
  std::vector<Use> uses;
  std::vector<std::vector<int>> units;
  std::vector<PlanParam> params;
  PlanBudgets budgets;
  std::vector<std::uint32_t> open_until = {};
  std::int64_t arena_bytes = 0;

  PlanInput input() const { return {uses, units, params, budgets, open_until, arena_bytes}; }
};

std::string describe(const Case& c) {
  std::string text = detail::concat("bucket ", c.budgets.bucket_bytes, ", inflight ",
                                    c.budgets.max_inflight, ", merge ", c.budgets.merge_below_bytes,
                                    ", limit ", c.budgets.live_limit_bytes, ", reuse ",
                                    c.budgets.reuse_distance_bytes, "; units:");
  for (const auto& unit : c.units) {
    text += " (";
    for (const int param : unit) {
      const PlanParam& of = c.params[static_cast<std::size_t>(param)];
      text += detail::concat(param, ":", of.full_bytes, of.persists ? "p " : " ");
    }
    text += ")";
  }
  text += "; uses:";
  for (const Use& use : c.uses) {
    text += detail::concat(" ", use.unit);
  }
  return text;
}

// Layers of one parameter each: forward in order, backward in reverse.
Case layers(int num_layers, std::int64_t limit_layers) {
  Case c;
  for (int i = 0; i < num_layers; ++i) {
    c.units.push_back({i});
    c.params.push_back({kPlannedLayerBytes, false});
    c.uses.push_back({i, Phase::kForward});
  }
  for (int i = num_layers; i-- > 0;) {
    c.uses.push_back({i, Phase::kBackward});
  }
  c.budgets.merge_below_bytes = 0;
  c.budgets.live_limit_bytes = limit_layers * kPlannedLayerBytes;
  c.budgets.reuse_distance_bytes = kUnlimited;
  return c;
}

struct Outcome {
  PrefetchPlan plan;
  std::int64_t num_gathered = 0;
  std::int64_t num_calls = 0;
  std::int64_t gathered_bytes = 0;
  std::int64_t num_demanded = 0;
};

Outcome checked_plan(const Case& c) {
  const PlanInput input = c.input();
  Outcome outcome;
  outcome.plan = make_plan(input);
  PlanSimulator simulator(input, outcome.plan);
  EXPECT_EQ(simulator.run(), "") << describe(c);
  outcome.num_gathered = simulator.num_gathered_params();
  outcome.num_calls = simulator.num_calls();
  outcome.gathered_bytes = simulator.gathered_bytes();
  for (const PlannedUse& use : outcome.plan.uses) {
    outcome.num_demanded += static_cast<std::int64_t>(use.demand.size());
  }
  return outcome;
}

// The fewest gathers that any plan can do with parameters of one size and one per unit: tries
// every set of parameters that could be held between uses.
int fewest_gathers(const Case& c) {
  constexpr int kImpossible = std::numeric_limits<int>::max() / 2;
  const auto limit = static_cast<int>(c.budgets.live_limit_bytes / c.params[0].full_bytes);
  const unsigned num_sets = 1U << c.params.size();
  std::vector<int> cost(num_sets, kImpossible);
  cost[0] = 0;
  for (std::size_t use = 0; use < c.uses.size(); ++use) {
    const unsigned running = 1U << c.uses[use].unit;
    const unsigned next = use + 1 < c.uses.size() ? 1U << c.uses[use + 1].unit : 0;
    std::vector<int> after(num_sets, kImpossible);
    for (unsigned held = 0; held < num_sets; ++held) {
      if (cost[held] == kImpossible || std::popcount(held | running) > std::max(limit, 1)) {
        continue;
      }
      const int gathers = cost[held] + ((held & running) == 0 ? 1 : 0);
      for (unsigned kept = 0; kept < num_sets; ++kept) {
        if ((kept & ~(held | running)) == 0 && std::popcount(kept | next) <= std::max(limit, 1)) {
          after[kept] = std::min(after[kept], gathers);
        }
      }
    }
    cost = after;
  }
  return *std::min_element(cost.begin(), cost.end());
}

TEST(PrefetchPlan, GathersAsFewLayersAsTheLimitAllows) {
  // 32 layers, forward and backward. With r layers resident at once the turn in the middle saves r
  // of 64 gathers.
  struct Expectation {
    std::int64_t limit_layers;
    std::int64_t num_gathered;
  };
  for (const auto& [limit, num_gathered] :
       {Expectation{0, 63}, Expectation{1, 63}, Expectation{2, 62}, Expectation{6, 58},
        Expectation{31, 33}, Expectation{32, 32}}) {
    for (const std::int64_t bucket : {std::int64_t{0}, kPlannedLayerBytes, kUnlimited}) {
      Case c = layers(32, limit);
      c.budgets.bucket_bytes = bucket;
      const Outcome outcome = checked_plan(c);
      EXPECT_EQ(outcome.num_gathered, num_gathered) << describe(c);
      EXPECT_EQ(outcome.num_calls, num_gathered) << describe(c);
      EXPECT_LE(outcome.plan.peak_bytes, std::max<std::int64_t>(limit, 1) * kPlannedLayerBytes);
      // Also where the turn fills the limit: what does not stay frees its memory at once.
      if (bucket > 0 && limit >= 2) {
        EXPECT_EQ(outcome.num_demanded, 0) << describe(c);
      }
    }
  }
}

TEST(PrefetchPlan, NeedsNoReuseDistanceToUseALimitThatIsTooSmallForAll) {
  for (const int max_inflight : {1, 4, 100}) {
    for (const std::int64_t bucket :
         {std::int64_t{0}, kPlannedLayerBytes, 2 * kPlannedLayerBytes, kUnlimited}) {
      Case c = layers(32, 6);
      c.budgets.reuse_distance_bytes = 0;
      c.budgets.bucket_bytes = bucket;
      c.budgets.max_inflight = max_inflight;
      const Outcome outcome = checked_plan(c);
      EXPECT_EQ(outcome.num_gathered, 58) << describe(c);
      EXPECT_EQ(outcome.plan.peak_bytes, 6 * kPlannedLayerBytes);
      EXPECT_EQ(outcome.num_demanded, bucket == 0 ? 58 : 0) << describe(c);
    }
  }
}

TEST(PrefetchPlan, HoldsOneUnitAtALimitOfZero) {
  Case c = layers(32, 0);
  c.budgets.bucket_bytes = kUnlimited;
  const Outcome outcome = checked_plan(c);
  EXPECT_EQ(outcome.plan.peak_bytes, kPlannedLayerBytes);
  // Only what is used twice in a row stays.
  EXPECT_TRUE(outcome.plan.uses[31].release.empty());
  EXPECT_EQ(outcome.plan.uses[30].release, std::vector<int>{30});
  EXPECT_EQ(outcome.num_demanded, 63);
}

TEST(PrefetchPlan, KeepsPrefetchesInFlightAheadOfEveryUse) {
  Case c = layers(8, 0);
  c.budgets.live_limit_bytes = kUnlimited;
  c.budgets.bucket_bytes = kPlannedLayerBytes;
  c.budgets.max_inflight = 3;
  const Outcome outcome = checked_plan(c);
  const std::vector<PlannedUse>& uses = outcome.plan.uses;
  EXPECT_EQ(outcome.plan.ahead.prefetch, (std::vector<GatherList>{{0}, {1}, {2}}));
  for (int i = 0; i <= 4; ++i) {
    EXPECT_TRUE(uses[static_cast<std::size_t>(i)].demand.empty());
    EXPECT_EQ(uses[static_cast<std::size_t>(i)].prefetch, (std::vector<GatherList>{{i + 3}}));
  }
  EXPECT_TRUE(uses[5].prefetch.empty());
}

TEST(PrefetchPlan, ReleasesWhatIsUsedAgainTooFarAhead) {
  // Between the two uses of layer i lie 2 * (3 - i) layers.
  for (const std::int64_t distance :
       {std::int64_t{0}, std::int64_t{1999}, std::int64_t{2000}, std::int64_t{4000}, kUnlimited}) {
    Case c = layers(4, 0);
    c.budgets.live_limit_bytes = kUnlimited;
    c.budgets.reuse_distance_bytes = distance;
    const Outcome outcome = checked_plan(c);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(outcome.plan.uses[static_cast<std::size_t>(i)].release.empty(),
                2 * (3 - i) * kPlannedLayerBytes <= distance)
          << "layer " << i << ", distance " << distance;
    }
  }
}

TEST(PrefetchPlan, DoesNotReleaseWhatThePrefetchWouldGatherAtOnce) {
  // a b a with a reuse distance of 0: when a runs, its second use is next but one.
  Case c;
  c.units = {{0}, {1}};
  c.params = {{kPlannedLayerBytes, false}, {kPlannedLayerBytes, false}};
  c.uses = {{0, Phase::kForward}, {1, Phase::kForward}, {0, Phase::kForward}};
  c.budgets.live_limit_bytes = kUnlimited;
  EXPECT_EQ(checked_plan(c).num_gathered, 3);
  c.budgets.bucket_bytes = kPlannedLayerBytes;
  EXPECT_EQ(checked_plan(c).num_gathered, 2);
}

TEST(PrefetchPlan, GathersSmallUsesTogether) {
  Case c = layers(9, 0);
  c.uses.resize(9);
  c.budgets.live_limit_bytes = kUnlimited;
  c.budgets.bucket_bytes = 4 * kPlannedLayerBytes;
  c.budgets.max_inflight = 2;
  c.budgets.merge_below_bytes = 3 * kPlannedLayerBytes;
  const Outcome outcome = checked_plan(c);
  EXPECT_EQ(outcome.plan.ahead.prefetch, (std::vector<GatherList>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(outcome.plan.uses[0].prefetch, (std::vector<GatherList>{{6, 7, 8}}));
  // The bucket is the stronger rule.
  c.budgets.bucket_bytes = 2 * kPlannedLayerBytes;
  EXPECT_EQ(checked_plan(c).plan.ahead.prefetch, (std::vector<GatherList>{{0, 1}, {2, 3}}));
}

TEST(PrefetchPlan, CutsAUseThatIsLargerThanTheBucket) {
  Case c = layers(2, 0);
  c.units[1] = {1, 2, 3, 4};
  c.params.resize(5, {kPlannedLayerBytes, false});
  c.params[3].full_bytes = 5 * kPlannedLayerBytes;  // larger than the bucket by itself
  c.budgets.live_limit_bytes = kUnlimited;
  c.budgets.bucket_bytes = 2 * kPlannedLayerBytes;
  EXPECT_EQ(checked_plan(c).plan.ahead.prefetch, (std::vector<GatherList>{{0}, {1, 2}, {3}, {4}}));
  // All of a use, or nothing, unless all of it can never be in flight.
  c.budgets.max_inflight = 3;
  const PrefetchPlan waits = checked_plan(c).plan;
  EXPECT_EQ(waits.ahead.prefetch, (std::vector<GatherList>{{0}}));
  EXPECT_EQ(waits.uses[0].prefetch, (std::vector<GatherList>{{1, 2}, {3}, {4}}));
  c.budgets.max_inflight = 2;
  const PrefetchPlan plan = checked_plan(c).plan;
  EXPECT_EQ(plan.ahead.prefetch, (std::vector<GatherList>{{0}}));
  EXPECT_EQ(plan.uses[0].prefetch, (std::vector<GatherList>{{1, 2}, {3}}));
  EXPECT_EQ(plan.uses[1].demand, (GatherList{4}));
}

TEST(PrefetchPlan, KnowsThatUnitsRunInsideUnits) {
  // Unit 0 runs around 1, 2 and 3, and shares its parameter with 2.
  Case c;
  c.units = {{0}, {1}, {0, 2}, {3}, {4}};
  c.params.resize(5, {kPlannedLayerBytes, false});
  c.uses = {{0, Phase::kForward},
            {1, Phase::kForward},
            {2, Phase::kForward},
            {3, Phase::kForward},
            {4, Phase::kForward}};
  c.open_until = {4, 2, 3, 4, 5};
  c.budgets.bucket_bytes = kUnlimited;
  c.budgets.live_limit_bytes = 2 * kPlannedLayerBytes;
  const Outcome outcome = checked_plan(c);
  EXPECT_EQ(outcome.plan.peak_bytes, 2 * kPlannedLayerBytes) << "no room to prefetch beside unit 0";
  EXPECT_EQ(outcome.num_gathered, 5);
  c.budgets.live_limit_bytes = 3 * kPlannedLayerBytes;
  EXPECT_EQ(checked_plan(c).num_demanded, 0);
}

TEST(PlanWalk, KnowsWhatIsHeldAndOnItsWayInTheMiddle) {
  Case c = layers(6, 3);
  c.budgets.bucket_bytes = kPlannedLayerBytes;
  const Outcome outcome = checked_plan(c);
  PlanWalk walk(c.input(), outcome.plan);
  EXPECT_EQ(walk.wanted(), (std::vector<bool>{true, true, true, false, false, false}));
  EXPECT_EQ(walk.outstanding(), (std::vector<GatherList>{{0}, {1}, {2}}));
  walk.advance_to(2);
  EXPECT_EQ(walk.wanted(), (std::vector<bool>{false, false, true, true, false, false}));
  EXPECT_EQ(walk.outstanding(), (std::vector<GatherList>{{2}, {3}}));
  EXPECT_EQ(walk.held_bytes(), 2 * kPlannedLayerBytes);
  walk.advance_to(12);
  EXPECT_EQ(walk.wanted(), std::vector<bool>(6, false));
  EXPECT_TRUE(walk.outstanding().empty());
  EXPECT_EQ(walk.held_bytes(), 0);
}

TEST(PrefetchPlan, GathersSharedAndPersistentParametersOnce) {
  // Parameter 0 is tied: first and last unit. Parameter 3 is small and persists.
  Case c;
  c.units = {{0, 3}, {1}, {2}, {0, 3}};
  c.params = {{4000, false}, {1000, false}, {1000, false}, {16, true}};
  for (int i = 0; i < 4; ++i) {
    c.uses.push_back({i, Phase::kForward});
  }
  for (int i = 4; i-- > 0;) {
    c.uses.push_back({i, Phase::kBackward});
  }
  c.budgets.reuse_distance_bytes = kUnlimited;
  c.budgets.live_limit_bytes = kUnlimited;
  EXPECT_EQ(checked_plan(c).num_gathered, 4);
  c.budgets.live_limit_bytes = 4016;  // too small for anything to stay beside the tied one
  EXPECT_EQ(checked_plan(c).num_gathered, 3 + 2 + 2 + 1);
}

TEST(PrefetchPlan, TakesUnitsWithoutParametersAndParametersWithoutBytes) {
  Case c;
  c.units = {{}, {0}, {1}};
  c.params = {{0, false}, {1000, false}};
  c.uses = {{0, Phase::kForward}, {1, Phase::kForward}, {2, Phase::kForward}, {0, Phase::kForward}};
  c.budgets.bucket_bytes = kPlannedLayerBytes;
  c.budgets.live_limit_bytes = kPlannedLayerBytes;
  const Outcome outcome = checked_plan(c);
  EXPECT_EQ(outcome.plan.ahead.prefetch, (std::vector<GatherList>{{0, 1}}));
  Case empty;
  EXPECT_TRUE(checked_plan(empty).plan.uses.empty());
}

TEST(PrefetchPlan, RefusesATraceOfUnitsThatThereAreNot) {
  Case c = layers(2, 1);
  c.uses.push_back({2, Phase::kForward});
  EXPECT_THROW(make_plan(c.input()), InternalError);
  Case d = layers(2, 1);
  d.units[1] = {7};
  EXPECT_THROW(make_plan(d.input()), InternalError);
}

Case random_case(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Case c;
  const int num_params = 1 + below(7);
  const int num_units = 1 + below(6);
  for (int i = 0; i < num_params; ++i) {
    c.params.push_back({below(6) * 10, false});
  }
  for (int i = 0; i < num_units; ++i) {
    std::vector<int> ids(static_cast<std::size_t>(num_params));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(static_cast<std::size_t>(below(std::min(4, num_params + 1))));
    std::sort(ids.begin(), ids.end());
    c.units.push_back(ids);
  }
  const int num_uses = below(14);
  for (int i = 0; i < num_uses; ++i) {
    c.uses.push_back({below(num_units), Phase::kForward});
  }
  if (below(2) == 0) {  // uses inside uses: an inner one ends first
    c.open_until.resize(c.uses.size());
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < c.uses.size(); ++i) {
      open.push_back(i);
      while (!open.empty() && (below(3) > 0 || i + 1 == c.uses.size())) {
        c.open_until[open.back()] = static_cast<std::uint32_t>(i + 1);
        open.pop_back();
      }
    }
  }
  c.arena_bytes = 256 * below(24);
  const auto budget = [&] { return below(5) == 0 ? kUnlimited : std::int64_t{10} * below(16); };
  c.budgets.bucket_bytes = budget();
  c.budgets.max_inflight = 1 + below(4);
  c.budgets.merge_below_bytes = budget();
  c.budgets.live_limit_bytes = budget();
  c.budgets.reuse_distance_bytes = budget();
  std::vector<std::int64_t> bytes;
  for (const PlanParam& param : c.params) {
    bytes.push_back(param.full_bytes);
  }
  std::int64_t largest_unit = 0;
  for (const std::vector<int>& unit : c.units) {
    std::int64_t unit_bytes = 0;
    for (const int param : unit) {
      unit_bytes += bytes[static_cast<std::size_t>(param)];
    }
    largest_unit = std::max(largest_unit, unit_bytes);
  }
  // Only where uses do not run inside each other can room be set apart for what persists.
  const std::int64_t room = c.open_until.empty() ? c.budgets.live_limit_bytes - largest_unit : -1;
  const std::vector<bool> persists = choose_persistent(bytes, below(3) * 10 - 10, budget(), room);
  for (std::size_t i = 0; i < persists.size(); ++i) {
    c.params[i].persists = persists[i];
  }
  return c;
}

TEST(PrefetchPlan, KeepsItsPromisesOnRandomTraces) {
  std::mt19937 random(20);
  for (int round = 0; round < 5000 && !HasFailure(); ++round) {
    Case c = random_case(random);
    const Outcome with_prefetch = checked_plan(c);
    c.budgets.bucket_bytes = 0;
    const Outcome without = checked_plan(c);
    std::int64_t all_bytes = 0;
    for (const PlanParam& param : c.params) {
      all_bytes += param.full_bytes;
    }
    // Otherwise prefetches take room in which more could be kept than is asked for.
    if (all_bytes <= c.budgets.live_limit_bytes) {
      EXPECT_LE(with_prefetch.gathered_bytes, without.gathered_bytes) << describe(c);
    }
  }
}

TEST(PrefetchPlan, IsOptimalForEqualParametersOnRandomTraces) {
  std::mt19937 random(21);
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    const int num_params = 2 + static_cast<int>(random() % 4);
    Case c = layers(num_params, static_cast<std::int64_t>(random() % 4));
    c.uses.clear();
    for (unsigned i = 0; i < 2 + random() % 12; ++i) {
      c.uses.push_back(
          {static_cast<int>(random() % static_cast<unsigned>(num_params)), Phase::kForward});
    }
    const int fewest = fewest_gathers(c);
    for (const std::int64_t bucket : {std::int64_t{0}, kPlannedLayerBytes, kUnlimited}) {
      c.budgets.bucket_bytes = bucket;
      EXPECT_EQ(checked_plan(c).num_gathered, fewest) << describe(c);
    }
  }
}

TEST(ChoosePersistent, TakesSmallOnesInOrderWhileTheyFit) {
  const std::vector<std::int64_t> bytes = {16, 1000, 16, 48, 16, 0};
  const auto chosen = [&](std::int64_t param, std::int64_t model, std::int64_t limit) {
    return choose_persistent(bytes, param, model, limit);
  };
  EXPECT_EQ(chosen(48, kUnlimited, kUnlimited),
            (std::vector<bool>{true, false, true, true, true, true}));
  EXPECT_EQ(chosen(48, 48, kUnlimited), (std::vector<bool>{true, false, true, false, true, true}));
  EXPECT_EQ(chosen(48, kUnlimited, 31),
            (std::vector<bool>{true, false, false, false, false, true}));
  EXPECT_EQ(chosen(kUnlimited, kUnlimited, kUnlimited), std::vector<bool>(6, true));
  EXPECT_EQ(chosen(0, kUnlimited, kUnlimited),
            (std::vector<bool>{false, false, false, false, false, true}));
}

}  // namespace
}  // namespace tessera::coordinator
