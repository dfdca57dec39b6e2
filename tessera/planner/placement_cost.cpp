#include "tessera/planner/placement_cost.h"

#include <algorithm>

#include "tessera/comm/staging_bytes.h"
#include "tessera/coordinator/shard_feed.h"
#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"
#include "tessera/grad/bucket.h"
#include "tessera/grad/reducer.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/ledger_lines.h"
#include "tessera/tier/io_engine.h"

namespace tessera::planner {
namespace {

// Without a budget: many small calls would cost more than they hide.
constexpr std::int64_t kSmallestBucketBytes = std::int64_t{4} << 20;
// With one: buckets and what belongs to them take less than half of it, whatever the types are.
constexpr std::int64_t kBucketsPerBudget = 16;
constexpr std::int64_t kTiniestBucketBytes = std::int64_t{64} << 10;

std::int64_t arena_bytes_of(const shard::Layout& layout) {
  return as_int(device::round_to_arena(layout.full_bytes()));
}

Tier tier_of(Place place) {
  return place == Place::kDevice ? Tier::kDevice
         : place == Place::kHost ? Tier::kHost
                                 : Tier::kNvme;
}

// Tiles and window are pools of their own.
std::int64_t feed_bytes(std::int64_t pool_bytes) {
  if (pool_bytes == 0) {
    return 0;
  }
  const coordinator::FeedSizes sizes =
      coordinator::feed_sizes(static_cast<std::size_t>(pool_bytes));
  return taken_bytes(block_bytes(as_int(2 * sizes.tile_bytes))) +
         taken_bytes(block_bytes(as_int(sizes.window_bytes)));
}

// Staging for as many as there are slots.
std::int64_t two_reductions(std::int64_t shard_numel, const PlacementOptions& options) {
  return taken_bytes(2 *
                     as_int(comm::reduce_scatter_staging_bytes(
                         shard_numel, options.wire_dtype, options.num_ranks, options.call_memory)));
}

}  // namespace

CutModel::CutModel(const ModelShapes& shapes, const PlacementOptions& given)
    : model(shapes), options(given) {
  layouts.reserve(shapes.params.size());
  for (const ParamShape& param : shapes.params) {
    layouts.emplace_back(param.numel, given.num_ranks, shapes.dtype);
  }
  for (const std::vector<int>& unit : shapes.units) {
    for (const int id : unit) {
      TESSERA_INVARIANT(id >= 0 && static_cast<std::size_t>(id) < layouts.size(),
                        "a unit names parameter ", id, "; there are ", layouts.size());
    }
  }
}

std::int64_t taken_bytes(std::int64_t bytes) {
  return as_int(grad::taken_bytes(static_cast<std::size_t>(bytes)));
}

std::int64_t block_bytes(std::int64_t bytes) {
  return as_int(tier::whole_blocks(static_cast<std::size_t>(bytes)));
}

bool uses_nvme(const std::vector<ShardPlaces>& places) {
  return std::any_of(places.begin(), places.end(), [](const ShardPlaces& each) {
    return each.parameter == Place::kNvme || each.gradient == Place::kNvme ||
           each.states == Place::kNvme;
  });
}

std::int64_t checksum_bytes(std::int64_t nvme_bytes) {
  return nvme_bytes / as_int(tier::kBlockBytes) * as_int(sizeof(std::uint64_t));
}

std::int64_t stored_parameter_uses(const CutModel& cut, const std::vector<ShardPlaces>& places) {
  std::int64_t bytes = 0;
  for (const std::vector<int>& unit : cut.model.units) {
    for (const int id : unit) {
      const auto i = static_cast<std::size_t>(id);
      if (places[i].parameter == Place::kNvme) {
        bytes += 2 * block_bytes(as_int(cut.layouts[i].shard_bytes()));
      }
    }
  }
  return bytes;
}

std::int64_t parameters_from_update(const CutModel& cut, const std::vector<ShardPlaces>& places,
                                    std::int64_t pool_bytes) {
  const auto window =
      as_int(coordinator::feed_sizes(static_cast<std::size_t>(pool_bytes)).window_bytes);
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::int64_t bytes = block_bytes(as_int(cut.layouts[i].shard_bytes()));
    const bool is_offered =
        places[i].parameter == Place::kNvme && cut.is_trainable(i) && bytes <= window;
    sum += is_offered ? bytes : 0;
  }
  return sum;
}

bool is_gathered(const CutModel& cut, const ShardPlaces& places) {
  const bool lies_elsewhere =
      cut.options.on_cuda ? places.parameter != Place::kDevice : places.parameter == Place::kNvme;
  return cut.options.num_ranks > 1 || lies_elsewhere;
}

UnitBytes largest_unit(const CutModel& cut, const std::vector<ShardPlaces>& places) {
  UnitBytes largest;
  for (std::size_t unit = 0; unit < cut.model.units.size(); ++unit) {
    std::int64_t bytes = 0;
    for (const int id : cut.model.units[unit]) {
      const auto i = static_cast<std::size_t>(id);
      bytes += is_gathered(cut, places[i]) ? arena_bytes_of(cut.layouts[i]) : 0;
    }
    if (bytes > largest.bytes) {
      largest = {unit, bytes};
    }
  }
  return largest;
}

std::int64_t whole_arena_bytes(const CutModel& cut, const std::vector<ShardPlaces>& places,
                               std::int64_t live_limit_bytes) {
  std::int64_t all = 0;
  std::int64_t rounding = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (is_gathered(cut, places[i])) {
      const std::int64_t bytes = arena_bytes_of(cut.layouts[i]);
      all += bytes;
      rounding += bytes - as_int(cut.layouts[i].full_bytes());
    }
  }
  const std::int64_t held =
      live_limit_bytes >= all ? all : std::min(live_limit_bytes + rounding, all);
  return held + largest_unit(cut, places).bytes;
}

std::int64_t choose_bucket_bytes(const CutModel& cut) {
  const PlacementOptions& options = cut.options;
  if (options.is_bucket_given) {
    return options.bucket_bytes;
  }
  const std::int64_t budget = options.memory_bytes();
  if (budget != kUnlimited) {
    return std::min(options.bucket_bytes, std::clamp(budget / kBucketsPerBudget,
                                                     kTiniestBucketBytes, kSmallestBucketBytes));
  }
  std::int64_t trainable_bytes = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    trainable_bytes += cut.is_trainable(i) ? as_int(cut.layouts[i].full_bytes()) : 0;
  }
  return std::min(options.bucket_bytes, std::max(trainable_bytes / 4, kSmallestBucketBytes));
}

std::vector<std::int64_t> possible_bucket_bytes(const CutModel& cut) {
  const PlacementOptions& options = cut.options;
  if (options.is_bucket_given || options.memory_bytes() == kUnlimited) {
    return {choose_bucket_bytes(cut)};
  }
  std::vector<std::int64_t> possible;
  for (std::int64_t bytes = kSmallestBucketBytes; bytes >= kTiniestBucketBytes; bytes /= 2) {
    possible.push_back(std::min(bytes, options.bucket_bytes));
  }
  return possible;
}

GradientCost gradient_cost(const CutModel& cut, const std::vector<ShardPlaces>& places,
                           std::int64_t bucket_bytes) {
  const int num_ranks = cut.options.num_ranks;
  std::vector<grad::GradientShape> shapes;
  std::vector<grad::BucketParam> params;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    const ParamShape& param = cut.model.params[i];
    const bool is_stored = places[i].gradient == Place::kNvme;
    shapes.push_back({param.numel, param.trainable, param.dynamic, is_stored});
    if (param.trainable) {
      params.push_back(
          {static_cast<int>(i), cut.layouts[i].shard_numel(), param.dynamic, is_stored});
    }
  }
  grad::ReducerOptions reductions;
  reductions.bucket_bytes = bucket_bytes;
  reductions.wire_dtype = cut.options.wire_dtype;
  GradientCost cost;
  cost.bytes = grad::gradient_bytes(shapes, num_ranks, reductions, cut.model.dtype);
  if (num_ranks > 1) {
    const std::size_t wire = bytes_of(cut.options.wire_dtype);
    const grad::BucketLayout layout = grad::plan_buckets(params, num_ranks, bucket_bytes, wire);
    cost.staging = two_reductions(layout.largest_shard_numel, cut.options);
  }
  return cost;
}

BucketNumel most_bucket_numel(const CutModel& cut, std::int64_t bucket_bytes) {
  BucketNumel all;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (cut.is_trainable(i)) {
      (cut.model.params[i].dynamic ? all.dynamic_numel : all.static_numel) +=
          cut.layouts[i].shard_numel();
    }
  }
  const std::int64_t wire = as_int(bytes_of(cut.options.wire_dtype));
  // A stored parameter is cut at steps, however small buckets are.
  const std::int64_t capacity =
      std::max(grad::kPieceStep, bucket_bytes / (wire * cut.options.num_ranks));
  return {std::min(capacity, all.static_numel), std::min(capacity, all.dynamic_numel)};
}

std::int64_t most_reduction_bytes(const CutModel& cut, std::int64_t bucket_bytes) {
  const int num_ranks = cut.options.num_ranks;
  if (num_ranks == 1) {
    return 0;
  }
  const BucketNumel most = most_bucket_numel(cut, bucket_bytes);
  const std::int64_t wire = as_int(bytes_of(cut.options.wire_dtype));
  std::int64_t bytes = two_reductions(most.static_numel, cut.options);
  for (const std::int64_t numel : {most.static_numel, most.dynamic_numel}) {
    bytes += 2 * (taken_bytes(numel * num_ranks * wire) + taken_bytes(4 * numel));
  }
  return bytes;
}

optim::SubGroupPlan sub_groups(const CutModel& cut, const std::vector<ShardPlaces>& places,
                               std::int64_t sub_group_numel) {
  std::vector<optim::SubGroupParam> params;
  params.reserve(cut.num_params());
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    optim::SubGroupParam param;
    param.shard_numel = cut.layouts[i].shard_numel();
    param.dtype = cut.model.dtype;
    param.trainable = cut.is_trainable(i);
    const auto tier = [](Place place) {
      return place == Place::kNvme ? Tier::kNvme : Tier::kDevice;
    };
    param.placement.parameter = tier(places[i].parameter);
    param.placement.gradient = tier(places[i].gradient);
    param.placement.states = tier(places[i].states);
    params.push_back(param);
  }
  return optim::plan_sub_groups(params, sub_group_numel, cut.options.num_states);
}

void complete(const CutModel& cut, std::int64_t num_micro_batches, Placement& placement) {
  const std::vector<ShardPlaces>& places = placement.params;
  const optim::SubGroupPlan plan = sub_groups(cut, places, placement.sub_group_numel);
  const auto num_tensors =
      as_int(optim::num_state_tensors(cut.model.dtype, cut.options.num_states));
  placement.uses_nvme = uses_nvme(places);
  const GradientCost gradients = gradient_cost(cut, places, placement.bucket_bytes);
  Lines lines;
  StepBytes& step = placement.step;
  step = {};
  placement.full_gradient_bytes = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const shard::Layout& layout = cut.layouts[i];
    const std::int64_t shard_bytes = as_int(layout.shard_bytes());
    const bool is_stored = places[i].parameter == Place::kNvme;
    lines.add(tier_of(places[i].parameter), Role::kShard,
              is_stored ? block_bytes(shard_bytes) : taken_bytes(shard_bytes));
    if (!cut.is_trainable(i)) {
      continue;
    }
    placement.full_gradient_bytes =
        std::max(placement.full_gradient_bytes, layout.numel() * as_int(bytes_of(layout.dtype())));
    const bool gradient_is_stored = places[i].gradient == Place::kNvme;
    const bool states_are_stored = places[i].states == Place::kNvme;
    if (gradient_is_stored) {
      const std::int64_t bytes = block_bytes(4 * layout.shard_numel());
      lines.add(Tier::kNvme, Role::kGradient, bytes);
      step.gradients_written += bytes * num_micro_batches;
      step.gradients_read += bytes * num_micro_batches;  // once per addition, and by the update
    }
    // Beside stored shards, states in memory have the layout of the store.
    const std::int64_t states_bytes =
        placement.uses_nvme ? as_int(plan.states_bytes[i]) : num_tensors * 4 * layout.shard_numel();
    lines.add(tier_of(places[i].states), Role::kOptimizer,
              states_are_stored ? states_bytes : taken_bytes(states_bytes));
  }
  lines.add(Tier::kDevice, Role::kGradient, gradients.bytes.shards + gradients.bytes.slots);
  lines.add(Tier::kHost, Role::kGradient, gradients.bytes.block_sums);
  lines.add(Tier::kDevice, Role::kFull, taken_bytes(placement.arena_bytes));
  for (const std::int64_t pool : {placement.gradient_pool_bytes, placement.optimizer_pool_bytes}) {
    lines.add(Tier::kHost, Role::kStaging, taken_bytes(block_bytes(pool)));
  }
  lines.add(Tier::kHost, Role::kStaging, feed_bytes(placement.parameter_pool_bytes));
  if (cut.options.verify) {
    lines.add(Tier::kHost, Role::kOther, checksum_bytes(lines.bytes(Tier::kNvme)));
  }
  placement.ledger = lines.take();
  placement.gather_staging_bytes =
      GatherCost(cut, placement.bucket_bytes).staging_bytes(placement.arena_bytes);
  placement.reduction_staging_bytes = gradients.staging;
  placement.comm_bytes = placement.gather_staging_bytes + placement.reduction_staging_bytes;

  step.states_read = as_int(plan.states_read_bytes + plan.parameters_read_bytes);
  step.states_written = as_int(plan.states_written_bytes);
  (cut.model.dtype == DType::kFloat32 ? step.states_written : step.parameters_written) +=
      as_int(plan.parameters_written_bytes);
  step.parameters_read = num_micro_batches * stored_parameter_uses(cut, places);
  step.parameters_from_update = parameters_from_update(cut, places, placement.parameter_pool_bytes);
}

}  // namespace tessera::planner
