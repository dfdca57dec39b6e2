// What groups are planned to reserve holds every call of a step, as those who make calls plan them.
#include "tessera/comm/staging.h"

#include <algorithm>
#include <optional>
#include <random>

#include <gtest/gtest.h>

#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"
#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_bytes.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/shard/layout.h"
#include "tests/planner/plan_cases.h"
#include "tests/support/sizes.h"

namespace tessera::planner {
namespace {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random_);
  }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 random_;
};

// Units of a few parameters, from none at all to larger than every limit; some shared, some
// dynamic.
ModelShapes random_model(Draw& draw) {
  ModelMaker maker(draw.one_of({DType::kFloat32, DType::kBFloat16}));
  const std::int64_t num_units = 1 + draw.below(12);
  const std::int64_t most = draw.one_of<std::int64_t>({200, 5000, 60000});
  for (std::int64_t unit = 0; unit < num_units; ++unit) {
    std::vector<std::int64_t> numels(static_cast<std::size_t>(1 + draw.below(6)));
    for (std::int64_t& numel : numels) {
      numel = draw.below(8) == 0 ? most * 5 : draw.below(most);
    }
    maker.unit("u" + std::to_string(unit), numels, draw.below(6) > 0);
  }
  ModelShapes model = maker.make();
  if (draw.below(3) == 0) {  // the last unit is dynamic, and needs a parameter of the first
    for (const int id : model.units.back()) {
      model.params[static_cast<std::size_t>(id)].dynamic = num_units > 1;
    }
  }
  if (num_units > 1) {
    model.units.back().insert(model.units.back().begin(), model.units.front().front());
  }
  return model;
}

class StagedCalls {
 public:
  StagedCalls(const ModelShapes& model, const MemoryPlanOptions& options)
      : model_(model), options_(options), plan_(planned(model, options)) {
    for (const ParamShape& param : model.params) {
      layouts_.emplace_back(param.numel, options.num_ranks, model.dtype);
    }
  }

  const MemoryPlan& plan() const { return plan_; }

  // By all ranks, in whichever groups they take.
  void expect_room_for_gather(const std::vector<int>& ids) const {
    std::vector<comm::GatherPiece> pieces = shards(ids);
    const int hosts = options_.num_gather_hosts;
    if (hosts == 1) {
      EXPECT_LE(gather_bytes(pieces, options_.num_ranks), plan_.staging.gathers);
    } else {
      std::vector<comm::GatherPiece> bytes = pieces;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        bytes[i].is_encoded = false;
        pieces[i].wire_bytes *= static_cast<std::size_t>(hosts);
      }
      EXPECT_LE(gather_bytes(bytes, hosts), plan_.staging.phase_across);
      EXPECT_LE(gather_bytes(pieces, options_.num_ranks / hosts), plan_.staging.phase_inside);
    }
    if (const int second = options_.num_secondary_ranks; second > 1) {
      std::vector<comm::GatherPiece> kept;
      for (const int id : ids) {
        if (!model_.params[static_cast<std::size_t>(id)].dynamic) {
          kept.push_back(shards({id}).front());
          kept.back().wire_bytes *= static_cast<std::size_t>(options_.num_ranks / second);
        }
      }
      EXPECT_LE(gather_bytes(kept, second), plan_.staging.secondary);
    }
  }
  std::int64_t gather_to_bytes(const std::vector<int>& ids) const {
    return static_cast<std::int64_t>(comm::gather_to_staging_bytes(
        shards(ids), static_cast<std::size_t>(options_.pack_below_bytes),
        {options_.num_ranks, options_.num_ranks, true, true, options_.call_memory}));
  }
  // Of one hop over `num_ranks`, which is quantised.
  std::int64_t hop_bytes(std::int64_t numel, int num_ranks) const {
    return static_cast<std::int64_t>(comm::encoded_reduce_scatter_staging_bytes(
        quant::wire_bytes(*options_.gradient_blocks, numel), num_ranks));
  }
  // Two at once, of the group that begins them, and of the one that goes across hosts.
  void expect_room_for_hops(std::int64_t shard_numel, std::int64_t first,
                            std::int64_t across) const {
    const int hosts = options_.num_reduction_hosts;
    EXPECT_LE(2 * hop_bytes(shard_numel * hosts, options_.num_ranks / hosts), first);
    if (hosts > 1) {
      EXPECT_LE(2 * hop_bytes(shard_numel, hosts), across);
    } else {
      EXPECT_EQ(across, 0);
    }
  }
  std::int64_t reduction_bytes(std::int64_t shard_numel) const {
    return static_cast<std::int64_t>(comm::reduce_scatter_staging_bytes(
        shard_numel, options_.wire_dtype, options_.num_ranks, options_.call_memory));
  }

  // A forward and a backward of every unit, as the coordinator plans them in such an arena.
  coordinator::PrefetchPlan prefetch_plan(std::int64_t bucket_bytes) const {
    std::vector<coordinator::Use> uses;
    const auto num_units = static_cast<coordinator::UnitId>(model_.units.size());
    for (coordinator::UnitId unit = 0; unit < num_units; ++unit) {
      uses.push_back({unit, coordinator::Phase::kForward});
    }
    for (coordinator::UnitId unit = num_units; unit-- > 0;) {
      uses.push_back({unit, coordinator::Phase::kBackward});
    }
    std::vector<coordinator::PlanParam> params;
    for (const shard::Layout& layout : layouts_) {
      params.push_back(
          {static_cast<std::int64_t>(device::round_to_arena(layout.full_bytes())), false});
    }
    coordinator::PlanInput input;
    input.uses = uses;
    input.unit_params = model_.units;
    input.params = params;
    input.budgets.bucket_bytes = bucket_bytes;
    input.budgets.live_limit_bytes = plan_.live_limit_bytes;
    input.arena_bytes = plan_.arena_bytes;
    return coordinator::make_placed_plan(input);
  }

  grad::BucketLayout buckets() const {
    std::vector<grad::BucketParam> params;
    for (std::size_t i = 0; i < model_.params.size(); ++i) {
      if (model_.params[i].trainable) {
        params.push_back({static_cast<int>(i), layouts_[i].shard_numel(), model_.params[i].dynamic,
                          plan_.params[i].gradient});
      }
    }
    return grad::plan_buckets(params, options_.num_ranks, plan_.bucket_bytes,
                              bytes_of(options_.wire_dtype),
                              options_.gradient_blocks ? options_.gradient_blocks->block_numel : 1);
  }

 private:
  // As they travel.
  std::vector<comm::GatherPiece> shards(const std::vector<int>& ids) const {
    std::vector<comm::GatherPiece> pieces;
    for (const int id : ids) {
      const shard::Layout& layout = layouts_[static_cast<std::size_t>(id)];
      const quant::BlockFormat format{options_.weight_bits, options_.block_numel};
      pieces.push_back(options_.weight_bits == 0
                           ? comm::GatherPiece{layout.shard_bytes(), false}
                           : comm::GatherPiece{quant::wire_bytes(format, layout.shard_numel()),
                                               layout.shard_numel() > 0});
    }
    return pieces;
  }
  std::int64_t gather_bytes(const std::vector<comm::GatherPiece>& pieces, int num_ranks) const {
    return static_cast<std::int64_t>(
        comm::all_gather_staging_bytes(pieces, static_cast<std::size_t>(options_.pack_below_bytes),
                                       num_ranks, options_.call_memory));
  }

  const ModelShapes& model_;
  const MemoryPlanOptions options_;
  const MemoryPlan plan_;
  std::vector<shard::Layout> layouts_;
};

void expect_room_for_every_call(const ModelShapes& model, const MemoryPlanOptions& options) {
  const StagedCalls calls(model, options);
  const MemoryPlan& plan = calls.plan();
  const std::int64_t room = plan.staging.gathers;
  EXPECT_EQ(plan.comm_bytes, plan.staging.total());
  EXPECT_GE(room, static_cast<std::int64_t>(comm::kSmallAllReduceBytes));
  for (const std::vector<int>& unit : model.units) {
    calls.expect_room_for_gather(unit);
  }
  for (const std::int64_t bucket_bytes : {std::int64_t{10000}, std::int64_t{128} << 20}) {
    const coordinator::PrefetchPlan plan = calls.prefetch_plan(bucket_bytes);
    for (const coordinator::GatherList& list : plan.ahead.prefetch) {
      SCOPED_TRACE("ahead");
      calls.expect_room_for_gather(list);
    }
    for (const coordinator::PlannedUse& use : plan.uses) {
      calls.expect_room_for_gather(use.demand);
      for (const coordinator::GatherList& list : use.prefetch) {
        calls.expect_room_for_gather(list);
      }
    }
  }
  const grad::BucketLayout buckets = calls.buckets();
  for (const grad::Bucket& bucket : buckets.buckets) {
    if (options.gradient_blocks) {
      calls.expect_room_for_hops(bucket.shard_numel, plan.staging.reductions,
                                 plan.staging.reductions_across);
    } else {
      EXPECT_LE(2 * calls.reduction_bytes(bucket.shard_numel), plan.staging.reductions);
    }
  }
  const std::int64_t dynamic_numel = buckets.largest_dynamic_numel;
  const bool is_apart = options.num_reduction_hosts > 1 || options.num_gather_hosts > 1;
  const std::int64_t dynamic_room = is_apart ? plan.staging.agreed : room;
  if (dynamic_numel == 0) {
    EXPECT_EQ(plan.staging.agreed + plan.staging.agreed_across, 0);
  } else if (options.gradient_blocks) {
    calls.expect_room_for_hops(dynamic_numel, dynamic_room, plan.staging.agreed_across);
  } else {
    EXPECT_LE(2 * calls.reduction_bytes(dynamic_numel), dynamic_room);
  }
  if (model.params[static_cast<std::size_t>(model.units.back().back())].dynamic) {
    EXPECT_LE(calls.gather_to_bytes(model.units.back()), room);
  }
}

TEST(StagingPlan, HoldsEveryCallOfAStepOfAnyModelWithinAnyBudget) {
  constexpr std::uint64_t kSeeds = support::rounds(150U, 30U);
  std::uint64_t num_planned = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Draw draw(seed);
    const ModelShapes model = random_model(draw);
    MemoryPlanOptions options = with_budget(kUnlimited, static_cast<int>(2 + draw.below(3)));
    options.pack_below_bytes = draw.one_of<std::int64_t>({0, 300, 4096, 64 << 10, 1 << 20});
    options.bucket_bytes = draw.one_of<std::int64_t>({1000, 100000, 64 << 20});
    options.wire_dtype = draw.one_of({DType::kFloat32, DType::kBFloat16});
    options.call_memory = draw.one_of({comm::CallMemory::kReached, comm::CallMemory::kCopied});
    options.gradient_blocks = draw.one_of<std::optional<quant::BlockFormat>>(
        {std::nullopt, quant::BlockFormat{4, 128}, quant::BlockFormat{8, 32}});
    if (options.gradient_blocks && options.num_ranks == 4) {
      options.num_reduction_hosts = draw.one_of({1, 2});
    }
    options.weight_bits = draw.one_of({0, 8});
    if (options.num_ranks == 4) {
      options.num_gather_hosts = draw.one_of({1, 2});
      options.num_secondary_ranks = draw.one_of({1, 2});
    }
    const std::int64_t all = planned(model, options).memory_bytes();
    for (const std::int64_t percent : {30, 60, 90, 100, 1000}) {
      options.host_bytes = percent == 1000 ? kUnlimited : all * percent / 100;
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed << ", " << percent << " % of " << all << " bytes, "
                   << options.num_ranks << " ranks, packed below " << options.pack_below_bytes);
      try {
        expect_room_for_every_call(model, options);
        ++num_planned;
      } catch (const ConfigError&) {  // a refusal, where the budget is too small
        ASSERT_LT(percent, 100);
      }
    }
  }
  EXPECT_GT(num_planned, kSeeds * 8 / 3);
}

// Alone a unit of one parameter packs nothing; a call that joins some of them packs them all.
TEST(StagingPlan, HoldsAPrefetchThatJoinsUses) {
  for (const std::vector<std::int64_t>& unit :
       {std::vector<std::int64_t>{125000}, {60000, 60000}, {1000}}) {
    MemoryPlanOptions options;
    options.num_ranks = 2;
    options.pack_below_bytes = std::int64_t{1} << 20;
    expect_room_for_every_call(equal_units(40, unit), options);
  }
}

TEST(StagingPlan, IsNothingForOneRank) {
  for (const ModelShapes& model : small_models()) {
    const MemoryPlan plan = planned(model, with_budget(kUnlimited), 1);
    EXPECT_EQ(plan.comm_bytes, 0);
  }
}

TEST(StagingPlan, OfGathersFollowsWhatIsPacked) {
  const ModelShapes model = equal_units(3, {40000, 40000});
  const auto staged = [&](const char* pack_below, const char* backend) {
    Config config;
    config.set("comm.pack_below_bytes", pack_below);
    config.set("comm.backend", backend);
    return planned(model, MemoryPlanOptions::from(config, 2, false)).staging.gathers;
  };
  // Six shards of 80000 bytes: none is small, or all of them are, and joined by a prefetch.
  EXPECT_EQ(staged("64KiB", "gloo"), static_cast<std::int64_t>(comm::kSmallAllReduceBytes));
  EXPECT_EQ(staged("1MiB", "gloo"), static_cast<std::int64_t>(grad::taken_bytes(6 * 2 * 80000)));
  EXPECT_EQ(staged("1MiB", "shm"), 0) << "ranks read each other's memory";
}

}  // namespace
}  // namespace tessera::planner
