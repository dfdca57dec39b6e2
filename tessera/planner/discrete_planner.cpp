#include "tessera/planner/discrete_planner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/core/error.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/nvme_buffers.h"
#include "tessera/planner/planner_base.h"
#include "tessera/planner/update_split.h"
#include "tessera/shard/shard_store.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kLargestSubGroupNumel = std::int64_t{16} << 20;
// Copies of this size run at the link's rate, and so much memory is often free in one piece.
constexpr std::int64_t kLargestSlotNumel = std::int64_t{8} << 20;
constexpr std::int64_t kSlotAlignment = 256;
// Of a device's budget, for one slot at most: a small device has smaller ones.
constexpr std::int64_t kSlotsPerBudget = 24;
// By which the CPU gets more of the update, until the device holds the gradients of its own.
constexpr double kShareStep = 1.0 / 16;
// Slots: one is filled, one is updated or written back. Memory that backward frees does more
// (engine/memory_lender.h), but only slots of our own may be copied D2H while the next backward
// runs, when the link has nothing else to do that way. They come after gathered parameters, which
// would be copied H2D twice without room.
constexpr std::int64_t kLeastSlots = 2;
constexpr std::int64_t kGoodSlots = 4;
constexpr std::int64_t kManySlots = 6;
constexpr std::int64_t kMostSlots = 10;
// Units in the arena of a discrete device: one is used, others are copied.
constexpr std::int64_t kGoodUnits = 4;
// Of a host budget, for the buffers of states and of parameters.
constexpr std::int64_t kOptimizerPoolsPerBudget = 8;
constexpr std::int64_t kParameterPoolsPerBudget = 16;
constexpr std::int64_t kGradientPoolsPerBudget = 16;

// How many of the parameters that may leave the device are where, in the order of use.
struct Reach {
  std::size_t parameters_on_device = 0;
  std::size_t states_on_device = 0;
  std::size_t secondary_on_device = 0;  // the rest is in host memory
  // Of those that are not on the device; the rest is on NVMe.
  std::size_t parameters_in_host = 0;
  std::size_t states_in_host = 0;
  std::size_t gradients_in_host = std::numeric_limits<std::size_t>::max();
  double cpu_share = 0;  // of the update, as in assign_updates()
};

// What a reach comes to.
struct Candidate {
  Placements placements;
  Lines lines;                  // of shards and gradients
  std::int64_t comm_bytes = 0;  // staging of the groups, whatever the arena is
};

// Slots on the device for sub-groups whose states are copied to it.
struct SlotNeed {
  std::int64_t slot_bytes = 0;
  std::int64_t num_sub_groups = 0;  // that are streamed
};

// Buffers of NVMe.
struct Pools {
  std::int64_t optimizer_bytes = 0;
  std::int64_t parameter_bytes = 0;
  std::int64_t gradient_bytes = 0;
};

// A discrete device beside its host. Who updates a shard decides what it takes on either side, and
// depends on where the others are, so reaches are searched for.
class DiscretePlanner : public Planner {
 public:
  // `offloads_gradients`: to NVMe, where the host does not hold them.
  DiscretePlanner(const CutModel& cut, std::int64_t num_micro_batches, std::int64_t bucket_bytes,
                  HostGradients host_gradients, bool offloads_gradients = false)
      : Planner(cut, num_micro_batches, host_gradients),
        offloads_gradients_(offloads_gradients && options_.has_nvme),
        bucket_bytes_(bucket_bytes),
        sub_group_numel_(std::max(shard::kShardStep,
                                  std::min(options_.sub_group_bytes / 4, kLargestSubGroupNumel) /
                                      shard::kShardStep * shard::kShardStep)),
        // Slots and staging do not depend on placements, but for gradients on NVMe.
        gradients_(
            gradient_cost(cut, Placements(cut.num_params()), bucket_bytes_, num_micro_batches)),
        gather_staging_bytes_(GatherCost(cut, bucket_bytes_).staging_bytes(kUnlimited)) {
    check_tiers();
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      if (may_leave_device(i)) {
        large_.push_back(i);
      }
    }
    const Placements least_kept = placements(with_gradients(Reach(), least_gradients()));
    if (uses_nvme(least_kept) && options_.has_nvme) {
      const OptimizerBuffers optimizer(cut_, least_kept);
      const ParameterBuffers parameters(cut_, least_kept);
      least_pools_ = {optimizer.smallest().bytes, parameters.smallest(), kSmallestPoolBytes};
      const auto within = [this](std::int64_t parts, std::int64_t low, std::int64_t high) {
        return std::clamp(options_.host_bytes / parts, low, std::max(low, high));
      };
      pools_ = {
          within(kOptimizerPoolsPerBudget, least_pools_.optimizer_bytes, optimizer.largest().bytes),
          within(kParameterPoolsPerBudget, least_pools_.parameter_bytes, parameters.largest()),
          whole_pages_below(
              within(kGradientPoolsPerBudget, kSmallestPoolBytes, largest_gradient_pool(cut_)))};
    }
  }

  std::optional<MemoryPlan> find() const {
    const Reach reach = wanted_reach();
    if (offloads_gradients_) {
      return find_with_gradients_on_nvme(reach);
    }
    std::optional<MemoryPlan> found = reach_host(reach, pools_);
    found = found ? std::move(found) : reach_host(least_reach(reach), least_pools_);
    return found ? std::move(found) : reach_host(tight_reach(reach), least_pools_);
  }
  [[noreturn]] void refuse_all() const {
    refuse_reach(with_gradients(tight_reach(wanted_reach()), least_gradients()));
  }

 private:
  // The last to leave: nothing else is in host memory that may be on NVMe. Smaller buffers come
  // when all have left, so that a larger budget has no more of them there.
  std::optional<MemoryPlan> find_with_gradients_on_nvme(const Reach& reach) const {
    for (const Reach& least : {least_reach(reach), tight_reach(reach)}) {
      std::optional<MemoryPlan> all = attempt(with_gradients(least, 0), pools_);
      for (std::size_t in_host = large_.size(); all && in_host-- > 1;) {
        if (auto some = attempt(with_gradients(least, in_host), pools_)) {
          return some;
        }
      }
      all = all ? std::move(all) : attempt(with_gradients(least, 0), least_pools_);
      if (all) {
        return all;
      }
    }
    return std::nullopt;
  }

  static Reach with_gradients(Reach reach, std::size_t gradients_in_host) {
    reach.gradients_in_host = gradients_in_host;
    return reach;
  }
  std::size_t least_gradients() const {
    return offloads_gradients_ ? 0 : std::numeric_limits<std::size_t>::max();
  }

  Reach wanted_reach() const {
    Reach reach;
    reach.parameters_in_host = large_.size();
    // States that were asked to be on NVMe stay in host memory as far as a budget goes.
    const bool keeps_states =
        options_.optimizer != Tier::kNvme || options_.host_bytes != kUnlimited;
    reach.states_in_host = keeps_states ? large_.size() : 0;
    reach.cpu_share = fitting_cpu_share(reach);
    reach.secondary_on_device = most_secondary_on_device(reach, true);
    reach_device(reach);
    return reach;
  }

  bool is_own_master() const { return optim::is_own_master(cut_.model.dtype); }
  bool keeps_parameters_on_device() const {
    return options_.parameters == Tier::kDevice ||
           (!options_.parameters && options_.optimizer == Tier::kDevice && is_own_master());
  }

  void check_tiers() const {
    TESSERA_CHECK(
        options_.has_nvme ||
            (options_.parameters != Tier::kNvme && options_.optimizer != Tier::kNvme),
        ConfigError,
        "place.parameters and place.optimizer: nvme needs a directory; give one (nvme.paths, "
        "--nvme DIR), or use host");
    TESSERA_CHECK(!is_own_master() || options_.optimizer != Tier::kDevice ||
                      options_.parameters.value_or(Tier::kDevice) == Tier::kDevice,
                  ConfigError,
                  "place.optimizer = device, and place.parameters elsewhere: fp32 parameters are "
                  "their own masters, which are updated beside their states; use place.optimizer = "
                  "host, or precision = bf16");
    TESSERA_CHECK(options_.optimizer != Tier::kDevice || options_.parameters != Tier::kNvme,
                  ConfigError,
                  "place.optimizer = device, and place.parameters = nvme: the CPU updates what is "
                  "on NVMe, which is written from host memory; use place.optimizer = host or nvme, "
                  "or place.parameters = host");
  }

  Placements placements(const Reach& reach) const {
    Placements all(cut_.num_params());
    for (std::size_t order = 0; order < large_.size(); ++order) {
      Placement& each = all[large_[order]];
      each.parameter = parameter_tier(order, reach);
      each.states = states_tier(order, reach, each.parameter);
      const bool leaves = order >= reach.gradients_in_host && cut_.is_trainable(large_[order]) &&
                          cut_.layouts[large_[order]].shard_numel() > 0;
      each.gradient = leaves ? Tier::kNvme : Tier::kDevice;
      each.secondary =
          has_secondary(order) && order >= reach.secondary_on_device ? Tier::kHost : Tier::kDevice;
    }
    assign_updates(cut_, {reach.cpu_share, cost_.num_micro_batches()}, all);
    return all;
  }

  // Nothing is on the device that need not be there: if that is too much, the CPU's share grows.
  double fitting_cpu_share(Reach reach) const {
    for (reach.cpu_share = wished_cpu_share(options_); reach.cpu_share < 1;
         reach.cpu_share = std::min(1.0, reach.cpu_share + kShareStep)) {
      if (fits_device(candidate(reach), false)) {
        break;
      }
    }
    return reach.cpu_share;
  }

  Tier parameter_tier(std::size_t order, const Reach& reach) const {
    if (keeps_parameters_on_device() ||
        (!options_.parameters && order < reach.parameters_on_device)) {
      return Tier::kDevice;
    }
    const bool may_stay = options_.parameters != Tier::kNvme || stays_off_nvme(large_[order]);
    return may_stay && order < reach.parameters_in_host ? Tier::kHost : Tier::kNvme;
  }

  Tier states_tier(std::size_t order, const Reach& reach, Tier parameter) const {
    if (!cut_.is_trainable(large_[order])) {
      // It has none; if it is unfrozen, they are beside what updates it.
      return parameter == Tier::kNvme ? Tier::kHost : Tier::kDevice;
    }
    if (options_.optimizer == Tier::kDevice) {
      return Tier::kDevice;
    }
    const bool may_be_there =
        parameter == Tier::kDevice || (parameter == Tier::kHost && !is_own_master());
    if (!options_.optimizer && order < reach.states_on_device && may_be_there) {
      return Tier::kDevice;
    }
    return order >= reach.states_in_host && has_states() ? Tier::kNvme : Tier::kHost;
  }

  Candidate candidate(const Reach& reach) const {
    Placements all = placements(reach);
    const bool on_nvme = std::any_of(
        all.begin(), all.end(), [](const Placement& each) { return each.gradient == Tier::kNvme; });
    const GradientCost gradients =
        on_nvme ? gradient_cost(cut_, all, bucket_bytes_, cost_.num_micro_batches()) : gradients_;
    const Lines lines = cost_.shard_lines(all, gradients);
    return {std::move(all), lines, gradients.staging.total() + gather_staging_bytes_};
  }

  SlotNeed slot_need(const Placements& placements, std::int64_t sub_group_numel) const {
    // New values, or the parameter that is its own master.
    const std::int64_t element_bytes = 4 * cut_.num_state_tensors() +
                                       as_int(bytes_of(cut_.model.dtype)) +
                                       cost_.slot_gradient_bytes();
    const std::int64_t within_budget = options_.device_bytes / kSlotsPerBudget / element_bytes /
                                       shard::kShardStep * shard::kShardStep;
    // About as many bytes, whether or not gradients pass through it.
    const std::int64_t largest =
        cost_.slot_gradient_bytes() == 0 ? kLargestSlotNumel : kLargestSlotNumel / 2;
    const std::int64_t slot_numel =
        std::min({sub_group_numel, largest, std::max(shard::kShardStep, within_budget)});
    SlotNeed need;
    std::int64_t largest_numel = 0;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      // Something of it is copied to the device for its update, or back after it.
      const bool is_copied =
          placements[i].states == Tier::kHost || placements[i].parameter == Tier::kHost;
      if (cut_.is_trainable(i) && placements[i].updater == Updater::kDevice && is_copied) {
        const std::int64_t numel = cut_.layouts[i].shard_numel();
        largest_numel = std::max(largest_numel, numel);
        need.num_sub_groups += (numel + slot_numel - 1) / slot_numel;
      }
    }
    const std::int64_t numel = std::min(slot_numel, rounded_up(largest_numel, shard::kShardStep));
    need.slot_bytes = rounded_up(numel * element_bytes, kSlotAlignment);
    return need;
  }

  // Before shards that were not asked to be on the device are put there, slots and arena have good
  // room; otherwise one unit and the least slots will do.
  bool fits_device(const Candidate& candidate, bool with_good_room) const {
    const Placements& all = candidate.placements;
    const SlotNeed slots = slot_need(all, sub_group_numel_);
    const std::int64_t num_slots =
        std::min(with_good_room ? kGoodSlots : kLeastSlots, slots.num_sub_groups);
    const std::int64_t arena = with_good_room ? good_arena(all) : largest_unit(cut_, all).bytes;
    return candidate.lines.bytes(Tier::kDevice) + chunk_bytes(Tier::kDevice) +
               num_slots * slots.slot_bytes + arena <=
           options_.device_bytes;
  }

  // Of the groups.
  std::int64_t chunk_bytes(Tier tier) const {
    return options_.group_memory.tier == tier ? options_.chunk_bytes() : 0;
  }

  std::int64_t good_arena(const Placements& placements) const {
    return std::min(kGoodUnits * largest_unit(cut_, placements).bytes, whole_arena(placements));
  }

  bool has_secondary(std::size_t order) const {
    return secondary_shard_bytes(cut_, large_[order]) > 0;
  }

  // The most of `count` that still fit.
  std::size_t most_on_device(std::size_t Reach::*count, Reach reach, bool with_good_room) const {
    std::size_t fitting = 0;
    std::size_t too_many = large_.size() + 1;
    while (too_many - fitting > 1) {
      const std::size_t middle = fitting + (too_many - fitting) / 2;
      reach.*count = middle;
      (fits_device(candidate(reach), with_good_room) ? fitting : too_many) = middle;
    }
    return fitting;
  }

  // As many as fit, as if host memory held the rest, which is when the device has most to do.
  std::size_t most_states_on_device(const Reach& reach) const {
    return options_.optimizer ? 0 : most_on_device(&Reach::states_on_device, reach, true);
  }

  // Before parameters and states: what does not fit is copied twice for every byte of it, as those
  // are, and once more with every further micro-batch.
  std::size_t most_secondary_on_device(const Reach& reach, bool with_good_room) const {
    return options_.num_secondary_ranks > 1
               ? most_on_device(&Reach::secondary_on_device, reach, with_good_room)
               : 0;
  }

  void reach_device(Reach& reach) const {
    const bool is_chosen_here = !options_.parameters && !keeps_parameters_on_device();
    reach.parameters_on_device = is_chosen_here ? large_.size() : 0;
    for (;; --reach.parameters_on_device) {
      reach.states_on_device = most_states_on_device(reach);
      if (reach.parameters_on_device == 0) {
        return;
      }
      // There they cost host memory, too, where the CPU updates them.
      const Candidate wanted = candidate(reach);
      const Reach least = with_gradients(least_reach(reach), least_gradients());
      if (fits_device(wanted, true) &&
          (fits_host(wanted, least_pools_) || fits_host(candidate(least), least_pools_))) {
        return;
      }
    }
  }

  // In host memory is nothing that may be on NVMe.
  Reach least_reach(Reach reach) const {
    if (options_.has_nvme) {
      reach.parameters_in_host = 0;
      reach.states_in_host = 0;
    }
    return reach;
  }

  // Nor is anything on the device but what was asked to be there, and secondary shards.
  Reach tight_reach(Reach reach) const {
    reach = least_reach(reach);
    if (options_.num_secondary_ranks > 1) {
      reach.parameters_on_device = 0;
      reach.states_on_device = 0;
      reach.secondary_on_device = 0;
      reach.secondary_on_device = most_secondary_on_device(reach, false);
    }
    return reach;
  }

  ByteSum host_need(const Candidate& candidate, const Pools& pools) const {
    const auto& [placements, lines, comm_bytes] = candidate;
    const std::int64_t nvme = lines.bytes(Tier::kNvme);
    const bool has_gradients = lines.bytes(Tier::kNvme, Role::kGradient) > 0;
    const auto in_host = [&lines = candidate.lines](Role role) {
      return lines.bytes(Tier::kPinned, role) + lines.bytes(Tier::kHost, role);
    };
    const std::int64_t secondary = secondary_bytes(cut_, placements, Tier::kHost);
    ByteSum need;
    need.add("parameters", in_host(Role::kShard) - secondary);
    need.add("secondary shards", secondary);
    need.add("measures of what is quantised", in_host(Role::kOther));
    need.add("gradients", in_host(Role::kGradient));
    need.add("optimizer states", in_host(Role::kOptimizer));
    need.add("new parameters before their copy to the device", in_host(Role::kStaging));
    need.add("staging of the network's calls", comm_bytes);
    need.add("chunks of shared memory", chunk_bytes(Tier::kHost));
    need.add("buffers of NVMe",
             nvme == 0 ? 0
                       : pool_bytes(options_, pools.optimizer_bytes) +
                             feed_pool_bytes(options_, pools.parameter_bytes) +
                             pool_bytes(options_, has_gradients ? pools.gradient_bytes : 0));
    need.add("checksums", checksum_bytes(options_, nvme));
    return need;
  }

  bool fits_host(const Candidate& candidate, const Pools& pools) const {
    return host_need(candidate, pools).total() <= options_.host_bytes;
  }

  std::optional<MemoryPlan> reach_host(Reach reach, const Pools& pools) const {
    const std::size_t most_states = reach.states_in_host;
    const std::size_t least_states = options_.has_nvme ? 0 : most_states;
    for (std::size_t states = most_states + 1; states-- > least_states;) {
      reach.states_in_host = states;
      if (auto found = attempt(reach, pools)) {
        return found;
      }
    }
    while (options_.has_nvme && reach.parameters_in_host > 0) {
      --reach.parameters_in_host;
      // Without states in host memory there can be more gradients than with all of them.
      for (const std::size_t states : {least_states, most_states}) {
        reach.states_in_host = states;
        if (auto found = attempt(reach, pools)) {
          return found;
        }
      }
    }
    return std::nullopt;
  }

  std::optional<MemoryPlan> attempt(const Reach& reach, const Pools& pools) const {
    Candidate chosen = candidate(reach);
    if (!fits_device(chosen, false) || !fits_host(chosen, pools)) {
      return std::nullopt;
    }
    MemoryPlan plan;
    plan.params = std::move(chosen.placements);
    plan.cpu_share =
        assign_updates(cut_, {reach.cpu_share, cost_.num_micro_batches()}, plan.params);
    plan.is_discrete = true;
    plan.memory_budget_bytes = options_.device_bytes;
    plan.host_budget_bytes = options_.host_bytes;
    plan.bucket_bytes = bucket_bytes_;
    plan.sub_group_numel = sub_group_numel_;
    if (options_.num_ranks == 1) {  // gathers are copies, and what fits may stay
      plan.max_inflight = options_.is_max_inflight_given ? 0 : coordinator::kHostCopiesInFlight;
      plan.reuse_distance_bytes = options_.is_reuse_distance_given ? 0 : kUnlimited;
    }
    if (uses_nvme(plan.params)) {
      const OptimizerBuffers optimizer(cut_, plan.params);
      set_optimizer_pool(optimizer.choose(taken_bytes(pools.optimizer_bytes)), plan);
      const ParameterBuffers parameters(cut_, plan.params);
      plan.parameter_pool_bytes = std::clamp(whole_pages_below(pools.parameter_bytes),
                                             parameters.smallest(), parameters.largest());
      plan.gradient_pool_bytes =
          chosen.lines.bytes(Tier::kNvme, Role::kGradient) > 0 ? pools.gradient_bytes : 0;
    }
    give_device_room(chosen.lines.bytes(Tier::kDevice), plan);
    cost_.complete(plan);
    const bool fits = plan.device_memory_bytes() <= options_.device_bytes &&
                      plan.host_memory_bytes() <= options_.host_bytes;
    return fits ? std::optional<MemoryPlan>(std::move(plan)) : std::nullopt;
  }

  void give_device_room(std::int64_t shard_bytes, MemoryPlan& plan) const {
    const SlotNeed slots = slot_need(plan.params, plan.sub_group_numel);
    std::int64_t arena = largest_unit(cut_, plan.params).bytes;
    std::int64_t num_slots = std::min(kLeastSlots, slots.num_sub_groups);
    std::int64_t rest = options_.device_bytes - shard_bytes - chunk_bytes(Tier::kDevice) - arena -
                        num_slots * slots.slot_bytes;
    const auto grow_arena = [&](std::int64_t wanted) {
      const std::int64_t more =
          std::clamp<std::int64_t>(wanted - arena, 0, std::max<std::int64_t>(rest, 0));
      const std::int64_t grown = more == wanted - arena ? more : whole_pages_below(more);
      arena += grown;
      rest -= grown;
    };
    const auto add_slots = [&](std::int64_t wanted) {
      if (slots.num_sub_groups > 0) {
        const std::int64_t most = std::min(wanted, slots.num_sub_groups) - num_slots;
        const std::int64_t more = std::clamp<std::int64_t>(rest / slots.slot_bytes, 0, most);
        num_slots += more;
        rest -= more * slots.slot_bytes;
      }
    };
    grow_arena(good_arena(plan.params));
    add_slots(kManySlots);
    grow_arena(whole_arena(plan.params));
    add_slots(kMostSlots);
    plan.num_update_slots = static_cast<int>(num_slots);
    plan.update_slot_bytes = slots.num_sub_groups > 0 ? slots.slot_bytes : 0;
    set_arena(arena, plan);
  }

  [[noreturn]] void refuse_reach(const Reach& reach) const {
    const Candidate least = candidate(reach);
    const auto& [all, lines, comm_bytes] = least;
    if (fits_device(least, false)) {
      refuse(host_need(least, least_pools_), "host memory", "memory.host", options_.host_bytes,
             options_.num_host_ranks, more_ranks_or_nvme());
    }
    const SlotNeed slots = slot_need(all, sub_group_numel_);
    const std::int64_t secondary = secondary_bytes(cut_, all, Tier::kDevice);
    ByteSum need;
    const std::int64_t encoding = encoding_bytes(cut_);
    need.add("parameters", lines.bytes(Tier::kDevice, Role::kShard) +
                               lines.bytes(Tier::kDevice, Role::kOther) - secondary - encoding);
    need.add("secondary shards", secondary);
    need.add("encoded shards", encoding);
    need.add("gradients", lines.bytes(Tier::kDevice, Role::kGradient));
    need.add("optimizer states", lines.bytes(Tier::kDevice, Role::kOptimizer));
    need.add("arena (the largest unit)", largest_unit(cut_, all).bytes);
    need.add("slots of the update", std::min(kLeastSlots, slots.num_sub_groups) * slots.slot_bytes);
    need.add("chunks of shared memory", chunk_bytes(Tier::kDevice));
    const bool is_wished =
        options_.parameters == Tier::kDevice || options_.optimizer == Tier::kDevice;
    refuse(need, "device memory", "memory.device", options_.device_bytes, options_.num_device_ranks,
           is_wished
               ? ", use more ranks, or let more live elsewhere (place.parameters, place.optimizer)"
               : ", or use more ranks");
  }

  const bool offloads_gradients_;
  const std::int64_t bucket_bytes_;
  const std::int64_t sub_group_numel_;
  const GradientCost gradients_;             // where none is on NVMe
  const std::int64_t gather_staging_bytes_;  // whatever the arena is
  std::vector<std::size_t> large_;  // ids of those that may leave the device, in the order of use
  Pools least_pools_;
  Pools pools_;  // within the budget
};

// Calls may be staged in host memory, and buckets grow with the device's budget: smaller ones are
// tried, so that a larger device never refuses what a smaller one allowed.
std::vector<std::int64_t> bucket_choices(const CutModel& cut) {
  std::vector<std::int64_t> sizes = {choose_bucket_bytes(cut)};
  for (const std::int64_t bytes : possible_bucket_bytes(cut)) {
    if (cut.options.sends_gradients() && bytes < sizes.front()) {
      sizes.push_back(bytes);
    }
  }
  return sizes;
}

}  // namespace

// Gradients of micro-batches have room in host memory where nothing else has to leave it for that;
// they are on NVMe where there is no other way.
MemoryPlan plan_discrete(const CutModel& cut, std::int64_t num_micro_batches) {
  const std::vector<std::int64_t> sizes = bucket_choices(cut);
  const auto find = [&](HostGradients kind, bool offloads_gradients) -> std::optional<MemoryPlan> {
    for (const std::int64_t bytes : sizes) {
      if (auto plan =
              DiscretePlanner(cut, num_micro_batches, bytes, kind, offloads_gradients).find()) {
        return plan;
      }
    }
    return std::nullopt;
  };
  std::optional<MemoryPlan> plan = find(HostGradients::kGood, false);
  const bool may_be_less = host_gradient_buffers(cut, num_micro_batches, HostGradients::kLeast) <
                           host_gradient_buffers(cut, num_micro_batches, HostGradients::kGood);
  if (may_be_less && (!plan || plan->uses_nvme)) {
    std::optional<MemoryPlan> least = find(HostGradients::kLeast, false);
    if (!plan || (least && least->bytes(Tier::kNvme) < plan->bytes(Tier::kNvme))) {
      plan = std::move(least);
    }
  }
  if (!plan && cut.options.has_nvme) {
    plan = find(HostGradients::kLeast, true);
  }
  if (!plan) {
    DiscretePlanner(cut, num_micro_batches, sizes.back(), HostGradients::kLeast,
                    cut.options.has_nvme)
        .refuse_all();
  }
  return std::move(*plan);
}

}  // namespace tessera::planner
