#include "tessera/planner/memory_planner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/discrete_planner.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/nvme_buffers.h"
#include "tessera/planner/planner_base.h"
#include "tessera/tier/io_engine.h"

namespace tessera::planner {
namespace {

// Roles that may leave memory for NVMe, in the order in which they do.
enum class Leaving : std::uint8_t { kNothing, kStates, kGradients, kParameters };

// Device and host are one memory. What a shard takes there does not depend on where others are, so
// shards are kept one by one.
class OneMemoryPlanner : public Planner {
 public:
  OneMemoryPlanner(const CutModel& cut, std::int64_t num_micro_batches)
      : Planner(cut, num_micro_batches),
        budget_(options_.memory_bytes()),
        in_memory_(placements(Leaving::kNothing)),
        secondary_bytes_(secondary_bytes(cut_, in_memory_, Tier::kDevice)),
        encoding_bytes_(encoding_bytes(cut_)) {}

  MemoryPlan make() const {
    std::optional<ByteSum> least;
    for (const Leaving leaving :
         {Leaving::kNothing, Leaving::kStates, Leaving::kGradients, Leaving::kParameters}) {
      if (leaving != Leaving::kNothing && !options_.has_nvme) {
        break;
      }
      ByteSum need;
      const Placements least_kept = placements(leaving);
      std::optional<MemoryPlan> found =
          uses_nvme(least_kept) ? fill(least_kept, need) : keep_all(need);
      if (found) {
        found->memory_budget_bytes = options_.memory_bytes();
        cost_.complete(*found);
        TESSERA_INVARIANT(found->memory_bytes() <= options_.memory_bytes(), "a plan of ",
                          found->memory_bytes(), " bytes for a budget of ",
                          options_.memory_bytes());
        return std::move(*found);
      }
      if (!least || need.total() < least->total()) {
        least = std::move(need);
      }
    }
    const bool is_device = options_.device_bytes < options_.host_bytes;
    refuse(*least, "memory", is_device ? "memory.device" : "memory.host", budget_,
           is_device ? 0 : options_.num_host_ranks, more_ranks_or_nvme());
  }

 private:
  // Of a shard in memory, at least; of one on NVMe, exactly (with pages of one block). So the bytes
  // on NVMe can be counted against a budget of memory.
  std::int64_t weight(Tier Placement::*role, std::size_t id) const {
    const shard::Layout& layout = cut_.layouts[id];
    const std::int64_t bytes = role == &Placement::parameter ? as_int(layout.shard_bytes())
                               : role == &Placement::states  ? cut_.states_bytes(id)
                                                             : 4 * layout.shard_numel();
    return taken_bytes(block_bytes(bytes));
  }

  // On NVMe is what was asked to be there, and whatever may leave.
  Placements placements(Leaving leaving) const {
    Placements all(cut_.num_params());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].updater = Updater::kCpu;
      if (cut_.layouts[i].shard_numel() == 0) {
        continue;
      }
      const bool wished = options_.parameters == Tier::kNvme && !stays_off_nvme(i);
      if (wished || (leaving >= Leaving::kParameters && options_.parameters != Tier::kDevice)) {
        all[i].parameter = Tier::kNvme;
      }
      if (cut_.is_trainable(i) && leaving >= Leaving::kGradients) {
        all[i].gradient = Tier::kNvme;
      }
      if (cut_.is_trainable(i) && has_states() &&
          (options_.optimizer == Tier::kNvme ||
           (leaving >= Leaving::kStates && options_.optimizer != Tier::kDevice))) {
        all[i].states = Tier::kNvme;
      }
    }
    return all;
  }

  std::string arena_text(std::size_t unit) const {
    return unit < cut_.model.unit_names.size()
               ? detail::concat("arena (unit '", cut_.model.unit_names[unit], "')")
               : "arena (the largest unit)";
  }

  // Of parameters and states alone, at least.
  std::int64_t least_shard_bytes() const {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      bytes += as_int(cut_.layouts[i].shard_bytes());
      bytes +=
          cut_.is_trainable(i) ? 4 * cut_.num_state_tensors() * cut_.layouts[i].shard_numel() : 0;
    }
    return bytes;
  }

  // With the largest buckets that leave room for everything else.
  std::optional<MemoryPlan> keep_all(ByteSum& need) const {
    // Where a budget was found no exact remedy is named, so smaller buckets need not be counted.
    const bool is_hopeless = options_.num_host_ranks > 0 && least_shard_bytes() > budget_;
    for (const std::int64_t bucket_bytes : possible_bucket_bytes(cut_)) {
      MemoryPlan plan;
      plan.params = in_memory_;
      plan.bucket_bytes = bucket_bytes;
      plan.sub_group_numel = OptimizerBuffers(cut_, in_memory_).largest_numel();
      const UnitBytes unit = largest_unit(cut_, in_memory_);
      plan.arena_bytes = unit.bytes;
      cost_.complete(plan);
      const auto in_memory = [&plan](Role role) {
        return plan.bytes(Tier::kDevice, role) + plan.bytes(Tier::kHost, role);
      };
      need = ByteSum();
      need.add("parameters", in_memory(Role::kShard) - secondary_bytes_ - plan.encoded_bytes);
      need.add("secondary shards", secondary_bytes_);
      need.add("encoded shards", encoding_bytes_);
      need.add("gradients", in_memory(Role::kGradient));
      need.add("measures of quantised gradients",
               gradient_cost(cut_, in_memory_, bucket_bytes, cost_.num_micro_batches())
                   .bytes.quant_sums);
      need.add("optimizer states", in_memory(Role::kOptimizer));
      need.add(arena_text(unit.unit), in_memory(Role::kFull));
      need.add("staging of the network's calls", plan.comm_bytes);
      need.add("chunks of shared memory", plan.chunk_bytes);
      if (need.total() <= budget_) {
        set_arena(GatherCost(cut_, bucket_bytes)
                      .grown_arena(unit.bytes, whole_arena(in_memory_), budget_ - need.total()),
                  plan);
        return plan;
      }
      if (is_hopeless) {
        break;
      }
    }
    return std::nullopt;
  }

  // What must be in memory, with buffers at their smallest; then the rest is divided.
  std::optional<MemoryPlan> fill(const Placements& least_kept, ByteSum& need) const {
    const auto sum = [&](Tier Placement::*role, bool on_nvme) {
      std::int64_t bytes = 0;
      for (std::size_t i = 0; i < least_kept.size(); ++i) {
        const bool is_there = role == &Placement::parameter || cut_.is_trainable(i);
        const bool counts = is_there && (least_kept[i].*role == Tier::kNvme) == on_nvme;
        bytes += counts ? weight(role, i) : 0;
      }
      return bytes;
    };
    const std::int64_t gradients_on_nvme = sum(&Placement::gradient, true);
    MemoryPlan smallest;
    smallest.bucket_bytes = choose_bucket_bytes(cut_);
    const UnitBytes unit = largest_unit(cut_, least_kept);
    smallest.arena_bytes = unit.bytes;
    smallest.parameter_pool_bytes = ParameterBuffers(cut_, least_kept).smallest();
    smallest.gradient_pool_bytes = gradients_on_nvme > 0 ? kSmallestPoolBytes : 0;
    smallest.optimizer_pool_bytes = OptimizerBuffers(cut_, least_kept).smallest().bytes;
    need.add(arena_text(unit.unit), taken_bytes(smallest.arena_bytes));
    need.add("buckets of reductions",
             most_reduction_bytes(cut_, smallest.bucket_bytes, cost_.num_micro_batches()));
    need.add("staging of gathers",
             GatherCost(cut_, smallest.bucket_bytes).staging_bytes(smallest.arena_bytes));
    need.add("chunks of shared memory", options_.chunk_bytes());
    need.add("sums of blocks",
             gradient_cost(cut_, least_kept, smallest.bucket_bytes, cost_.num_micro_batches())
                 .bytes.block_sums);
    // Two pools, each of whole pages.
    const std::int64_t spare = 2 * as_int(device::page_bytes() - tier::kBlockBytes);
    need.add("parameter buffers", taken_bytes(smallest.parameter_pool_bytes) + spare);
    need.add("gradient buffers", taken_bytes(smallest.gradient_pool_bytes));
    need.add("optimizer buffers", taken_bytes(smallest.optimizer_pool_bytes));
    need.add("checksums",
             checksum_bytes(options_, sum(&Placement::parameter, true) + gradients_on_nvme +
                                          sum(&Placement::states, true)));
    need.add("parameters", sum(&Placement::parameter, false));
    need.add("secondary shards", secondary_bytes_);
    need.add("encoded shards", encoding_bytes_);
    need.add("gradients", sum(&Placement::gradient, false));
    need.add("optimizer states", sum(&Placement::states, false));
    if (need.total() > budget_) {
      return std::nullopt;
    }
    return divide(budget_ - need.total(), least_kept, std::move(smallest));
  }

  // One half to buffers and arena, until they have what they can use; the other keeps shards.
  MemoryPlan divide(std::int64_t rest, const Placements& least_kept, MemoryPlan plan) const {
    const OptimizerBuffers buffers(cut_, least_kept);
    const std::int64_t smallest_optimizer = taken_bytes(plan.optimizer_pool_bytes);
    const std::int64_t optimizer_growth = taken_bytes(buffers.largest().bytes) - smallest_optimizer;
    const std::int64_t parameter_growth =
        ParameterBuffers(cut_, least_kept).largest() - plan.parameter_pool_bytes;
    const std::int64_t gradient_growth =
        plan.gradient_pool_bytes > 0 ? largest_gradient_pool(cut_) - plan.gradient_pool_bytes : 0;
    const std::int64_t whole = whole_arena(least_kept);
    const std::int64_t arena_wanted =
        budget_ == kUnlimited ? whole : std::min(whole, 2 * plan.arena_bytes);
    const GatherCost gathers(cut_, plan.bucket_bytes);
    const std::int64_t arena_growth = gathers.bytes(arena_wanted) - gathers.bytes(plan.arena_bytes);
    const std::int64_t all_growth =
        optimizer_growth + parameter_growth + gradient_growth + arena_growth;
    const std::int64_t growth = std::min(least_kept != in_memory_ ? rest / 2 : rest, all_growth);

    const OptimizerBuffers::Choice choice = buffers.choose(
        smallest_optimizer +
        (growth == all_growth ? optimizer_growth : std::min(growth / 2, optimizer_growth)));
    const std::int64_t parameter_more = whole_pages_below(std::min(growth / 4, parameter_growth));
    const std::int64_t gradient_more = whole_pages_below(std::min(growth / 8, gradient_growth));
    const std::int64_t arena_more =
        growth - parameter_more - gradient_more - (taken_bytes(choice.bytes) - smallest_optimizer);
    plan.params = least_kept;
    keep_shards(rest - growth, plan.params);
    set_arena(gathers.grown_arena(plan.arena_bytes, arena_wanted, arena_more), plan);
    set_optimizer_pool(choice, plan);
    // What turned out not to be on NVMe needs no buffers.
    const auto is_on_nvme = [&plan](Tier Placement::*role) {
      return std::any_of(plan.params.begin(), plan.params.end(),
                         [role](const Placement& each) { return each.*role == Tier::kNvme; });
    };
    plan.parameter_pool_bytes = is_on_nvme(&Placement::parameter)
                                    ? plan.parameter_pool_bytes + parameter_more
                                    : ParameterBuffers(cut_, plan.params).smallest();
    plan.gradient_pool_bytes =
        is_on_nvme(&Placement::gradient) ? plan.gradient_pool_bytes + gradient_more : 0;
    return plan;
  }

  void keep_shards(std::int64_t room, Placements& placements) const {
    const auto keep = [&](Tier Placement::*role, bool is_small_one, bool is_large_one) {
      for (std::size_t i = 0; i < placements.size(); ++i) {
        const std::int64_t bytes = weight(role, i);
        const bool is_meant = is_small(i) ? is_small_one : is_large_one;
        if (is_meant && placements[i].*role != in_memory_[i].*role && bytes <= room) {
          placements[i].*role = in_memory_[i].*role;
          room -= bytes;
        }
      }
    };
    keep(&Placement::parameter, true, false);
    keep(&Placement::parameter, false, true);
    keep(&Placement::gradient, true, true);
    keep(&Placement::states, true, true);
  }

  const std::int64_t budget_;
  const Placements in_memory_;
  const std::int64_t secondary_bytes_;
  const std::int64_t encoding_bytes_;
};

}  // namespace

MemoryPlan plan_memory(const ModelShapes& model, const MemoryPlanOptions& options,
                       std::int64_t num_micro_batches) {
  const CutModel cut(model, options);
  MemoryPlan plan = options.is_discrete ? plan_discrete(cut, num_micro_batches)
                                        : OneMemoryPlanner(cut, num_micro_batches).make();
  plan.comm_tier = options.call_memory == comm::CallMemory::kCopied ? Tier::kPinned : Tier::kHost;
  for (const shard::Layout& layout : cut.layouts) {
    plan.shard_numel += layout.shard_numel();
  }
  const std::int64_t nvme_bytes = plan.bytes(Tier::kNvme);
  TESSERA_CHECK(nvme_bytes <= options.nvme_bytes, ConfigError, "NVMe: a rank needs ",
                approximate_bytes(nvme_bytes), ", memory.nvme allows ",
                approximate_bytes(options.nvme_bytes), ". Raise memory.nvme to ",
                exact_bytes(nvme_bytes), " (--nvme-budget), or keep more in memory (memory.host)");
  return plan;
}

}  // namespace tessera::planner
