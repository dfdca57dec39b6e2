#include "cli/inspect_plan.h"

#include <algorithm>
#include <span>
#include <utility>

#include "tessera/coordinator/plan_walk.h"
#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"

namespace tessera::cli {
namespace {

using coordinator::GatherList;
using coordinator::Phase;
using coordinator::PrefetchPlan;
using coordinator::Use;

// More is no training anybody does, and would not fit into memory.
constexpr std::int64_t kMaxUses = std::int64_t{1} << 20;

std::int64_t full_bytes_of(const shard::Layout& layout) {
  return static_cast<std::int64_t>(layout.full_bytes());
}

std::int64_t arena_bytes_of(const shard::Layout& layout) {
  return static_cast<std::int64_t>(device::round_to_arena(layout.full_bytes()));
}

void measure_params(const StepPlanInput& input, StepPlan& plan) {
  for (const models::ParamShape& param : input.model.params) {
    const shard::StoredFormat format = input.memory_options.stored.format_of(
        param.name, param.trainable, param.numel(), static_cast<int>(param.sizes.size()));
    const shard::Layout& layout = plan.layouts.emplace_back(param.numel(), input.mesh.shard_size(),
                                                            input.model.dtype, format);
    plan.numel += layout.numel();
    plan.full_bytes += full_bytes_of(layout);
    plan.shard_bytes += static_cast<std::int64_t>(layout.shard_bytes());
  }
}

// In a group of one a shard in the memory that operators read is the full parameter: it is used
// where it lies, unless it has to be decoded.
bool is_gathered(const StepPlanInput& input, const StepPlan& plan, int id) {
  if (input.mesh.shard_size() > 1 || plan.layouts[index_of(id)].is_encoded() || !input.memory) {
    return input.mesh.shard_size() > 1 || plan.layouts[index_of(id)].is_encoded();
  }
  return input.memory->plan.params[index_of(id)].parameter != Tier::kDevice;
}

void measure_units(const StepPlanInput& input, StepPlan& plan) {
  plan.owners.assign(plan.layouts.size(), -1);
  plan.num_units.assign(plan.layouts.size(), 0);
  for (std::size_t i = 0; i < input.model.units.size(); ++i) {
    const models::UnitShape& shape = input.model.units[i];
    StepPlan::Unit& unit = plan.units.emplace_back();
    unit.params = shape.own;
    unit.params.insert(unit.params.end(), shape.external.begin(), shape.external.end());
    std::sort(unit.params.begin(), unit.params.end());
    for (const int id : unit.params) {
      if (is_gathered(input, plan, id)) {
        unit.gathered.push_back(id);
        unit.gathered_bytes += full_bytes_of(plan.layouts[index_of(id)]);
      }
      unit.full_bytes += full_bytes_of(plan.layouts[index_of(id)]);
      ++plan.num_units[index_of(id)];
      int& owner = plan.owners[index_of(id)];
      owner = owner < 0 ? static_cast<int>(i) : owner;
    }
    for (const int id : shape.own) {
      unit.shard_bytes += static_cast<std::int64_t>(plan.layouts[index_of(id)].shard_bytes());
    }
  }
}

// As Coordinator::finalize().
void choose_persistent(const StepPlanInput& input, StepPlan& plan) {
  std::vector<std::int64_t> bytes;
  for (std::size_t id = 0; id < plan.layouts.size(); ++id) {
    bytes.push_back(is_gathered(input, plan, static_cast<int>(id)) ? full_bytes_of(plan.layouts[id])
                                                                   : 0);
  }
  std::int64_t largest = 0;
  for (const StepPlan::Unit& unit : plan.units) {
    largest = std::max(largest, unit.gathered_bytes);
  }
  const coordinator::CoordinatorOptions& options = input.options;
  const std::int64_t room = coordinator::room_to_persist(options.budgets.live_limit_bytes, largest);
  plan.persists = coordinator::choose_persistent(bytes, options.persist_param_bytes,
                                                 options.persist_model_bytes, room);
  for (std::size_t id = 0; id < bytes.size(); ++id) {
    plan.persists[id] = plan.persists[id] && bytes[id] > 0;  // else it is not gathered at all
    plan.persistent_bytes += bytes[id] * (plan.persists[id] ? 1 : 0);
  }
}

// As UnitTable::arena_bytes().
std::int64_t arena_bytes(const StepPlanInput& input, const StepPlan& plan,
                         std::int64_t live_limit_bytes) {
  std::int64_t all = 0;
  std::int64_t rounding = 0;
  for (std::size_t id = 0; id < plan.layouts.size(); ++id) {
    if (is_gathered(input, plan, static_cast<int>(id))) {
      all += arena_bytes_of(plan.layouts[id]);
      rounding += arena_bytes_of(plan.layouts[id]) - full_bytes_of(plan.layouts[id]);
    }
  }
  std::int64_t largest = 0;
  for (const StepPlan::Unit& unit : plan.units) {
    std::int64_t bytes = 0;
    for (const int id : unit.gathered) {
      bytes += arena_bytes_of(plan.layouts[index_of(id)]);
    }
    largest = std::max(largest, bytes);
  }
  return (live_limit_bytes >= all ? all : std::min(live_limit_bytes + rounding, all)) + largest;
}

// All micro-batches of a step are one pass.
std::vector<Use> trace_of_chain(const std::vector<models::UnitShape>& units,
                                std::int64_t num_micro_batches) {
  std::vector<Use> uses;
  for (std::int64_t micro = 0; micro < num_micro_batches; ++micro) {
    for (std::size_t i = 0; i < units.size(); ++i) {
      uses.push_back({static_cast<coordinator::UnitId>(i), Phase::kForward});
    }
    for (std::size_t i = units.size(); i-- > 0;) {
      if (!units[i].has_backward) {
        break;  // nor has any before it
      }
      uses.push_back({static_cast<coordinator::UnitId>(i), Phase::kBackward});
    }
  }
  return uses;
}

// Carries the plan of a step out, and writes down what happens.
void walk_plan(const coordinator::PlanInput& input, const PrefetchPlan& prefetch, StepPlan& plan) {
  coordinator::PlanWalk walk(input, prefetch);
  std::int64_t held_bytes = 0;
  const auto start = [&](GatherList params) {
    GatherCall call{std::move(params), 0};
    for (const int id : call.params) {
      call.bytes += full_bytes_of(plan.layouts[index_of(id)]);
      ++plan.num_gathers[index_of(id)];
    }
    held_bytes += call.bytes;
    plan.step.num_gathers += call.params.empty() ? 0 : 1;
    plan.step.gathered_bytes += call.bytes;
    plan.step.peak_bytes = std::max(plan.step.peak_bytes, held_bytes);
    return call;
  };
  for (const GatherList& list : prefetch.ahead.prefetch) {
    plan.before.push_back(start(list));
  }
  for (std::size_t i = 0; i < input.uses.size(); ++i) {
    TimelineUse use;
    use.use = input.uses[i];
    use.demand = start(walk.begin_use());
    walk.start_prefetches();
    for (const GatherList& list : prefetch.uses[i].prefetch) {
      use.ahead.push_back(start(list));
    }
    use.held_bytes = held_bytes;
    use.release = walk.end_uses();
    for (const int id : use.release) {
      held_bytes -= full_bytes_of(plan.layouts[index_of(id)]);
    }
    plan.step.num_misses += static_cast<std::int64_t>(use.demand.params.size());
    plan.uses.push_back(std::move(use));
  }
}

void plan_gathers(const StepPlanInput& input, std::span<const Use> uses, StepPlan& plan) {
  std::vector<std::vector<int>> unit_params;
  for (const StepPlan::Unit& unit : plan.units) {
    unit_params.push_back(unit.gathered);
  }
  std::vector<coordinator::PlanParam> params;
  for (std::size_t id = 0; id < plan.layouts.size(); ++id) {
    params.push_back(
        {input.memory ? arena_bytes_of(plan.layouts[id]) : full_bytes_of(plan.layouts[id]),
         plan.persists[id]});
  }
  coordinator::PlanInput plan_input;
  plan_input.uses = uses;
  plan_input.unit_params = unit_params;
  plan_input.params = params;
  plan_input.budgets = input.options.budgets;
  walk_plan(
      plan_input,
      input.memory ? coordinator::make_placed_plan(plan_input) : coordinator::make_plan(plan_input),
      plan);
}

// Nothing is gathered: shards are used where they lie.
void walk_alone(std::span<const Use> uses, StepPlan& plan) {
  for (const Use& each : uses) {
    const StepPlan::Unit& unit = plan.units[index_of(each.unit)];
    TimelineUse use;
    use.use = each;
    use.held_bytes = unit.full_bytes;
    plan.uses.push_back(use);
    plan.step.peak_bytes = std::max(plan.step.peak_bytes, unit.full_bytes);
  }
}

}  // namespace

StepPlan plan_step(const StepPlanInput& input) {
  const auto num_units = static_cast<std::int64_t>(input.model.units.size());
  TESSERA_CHECK(input.num_micro_batches <= kMaxUses / (2 * num_units), ConfigError, "a step of ",
                input.num_micro_batches, " micro-batches of ", num_units, " units: at most ",
                kMaxUses, " uses can be planned; take fewer micro-batches");
  StepPlan plan;
  measure_params(input, plan);
  plan.num_gathers.assign(plan.layouts.size(), 0);
  measure_units(input, plan);
  const std::vector<Use> uses = trace_of_chain(input.model.units, input.num_micro_batches);
  const bool gathers =
      std::any_of(plan.units.begin(), plan.units.end(),
                  [](const StepPlan::Unit& unit) { return !unit.gathered.empty(); });
  if (!gathers) {
    plan.persists.assign(plan.layouts.size(), false);
    walk_alone(uses, plan);
    return plan;
  }
  choose_persistent(input, plan);
  plan.arena_bytes = input.memory
                         ? input.memory->plan.arena_bytes
                         : arena_bytes(input, plan, input.options.budgets.live_limit_bytes);
  plan_gathers(input, uses, plan);
  return plan;
}

}  // namespace tessera::cli
