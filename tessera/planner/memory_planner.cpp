#include "tessera/planner/memory_planner.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/nvme_buffers.h"
#include "tessera/planner/update_split.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/io_engine.h"

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

// A sum of bytes, and its arithmetic in words.
class ByteSum {
 public:
  void add(const std::string& what, std::int64_t bytes) {
    if (bytes > 0) {
      text_ << (total_ > 0 ? " + " : "") << approximate_bytes(bytes) << " " << what;
      total_ += bytes;
    }
  }
  std::int64_t total() const { return total_; }
  std::string text() const { return text_.str(); }

 private:
  std::int64_t total_ = 0;
  std::ostringstream text_;
};

// What all plans share: options, sizes that follow from placements, and refusals.
class Planner {
 public:
  Planner(const CutModel& cut, std::int64_t num_micro_batches,
          HostGradients host_gradients = HostGradients::kCopies)
      : cut_(cut), options_(cut.options), cost_(cut, num_micro_batches, host_gradients) {
    std::int64_t room = options_.parameters_host_bytes;
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      const auto bytes = as_int(cut_.layouts[i].shard_bytes());
      const bool stays = may_leave_device(i) && bytes <= room;
      room -= stays && room != kUnlimited ? bytes : 0;
      stays_off_nvme_.push_back(stays || bytes == 0);
    }
  }

 protected:
  bool is_small(std::size_t id) const {
    return as_int(cut_.layouts[id].full_bytes()) <= kSmallParamBytes;
  }
  bool may_leave_device(std::size_t id) const { return !options_.is_discrete || !is_small(id); }
  // Where parameters were asked to be on NVMe: this one is among those that stay in memory.
  bool stays_off_nvme(std::size_t id) const { return stays_off_nvme_[id]; }
  bool has_states() const { return cut_.num_state_tensors() > 0; }

  // One rank on a discrete device may hold all, unless a limit was given; ranks are there to hold
  // less.
  bool has_live_limit() const {
    return !options_.is_discrete || options_.is_live_limit_given || options_.num_ranks > 1;
  }
  std::int64_t whole_arena(const Placements& placements) const {
    return whole_arena_bytes(cut_, placements,
                             has_live_limit() ? options_.live_limit_bytes : kUnlimited);
  }
  void set_arena(std::int64_t arena_bytes, MemoryPlan& plan) const {
    const std::int64_t whole = whole_arena(plan.params);
    plan.arena_bytes = std::min(arena_bytes, whole);
    plan.live_limit_bytes = arena_bytes < whole              ? arena_bytes
                            : has_live_limit() || whole == 0 ? options_.live_limit_bytes
                                                             : gathered_bytes(cut_, plan.params);
  }
  void set_optimizer_pool(const OptimizerBuffers::Choice& choice, MemoryPlan& plan) const {
    const auto lease_bytes =
        as_int(sub_groups(cut_, plan.params, choice.sub_group_numel).max_lease_bytes);
    plan.sub_group_numel = choice.sub_group_numel;
    plan.num_optimizer_buffers = lease_bytes > 0 ? choice.num_buffers : 0;
    plan.optimizer_pool_bytes = plan.num_optimizer_buffers * lease_bytes;
  }

  // `num_sharing`: ranks of the machine whose memory the budget was found from; 0: it was given.
  [[noreturn]] void refuse(const ByteSum& need, const char* memory, const char* budget,
                           std::int64_t budget_bytes, int num_sharing,
                           const char* otherwise) const {
    const std::string what =
        detail::concat("the model does not fit: one of ", options_.num_ranks,
                       options_.num_ranks == 1 ? " rank" : " ranks", " needs ",
                       approximate_bytes(need.total()), " of ", memory, ": ", need.text(), "; ");
    TESSERA_CHECK(num_sharing > 0, ConfigError, what, budget, " allows ",
                  approximate_bytes(budget_bytes), ". Raise ", budget, " to at least ",
                  exact_bytes(need.total()), otherwise);
    const bool is_host = std::string_view(budget) == "memory.host";
    throw ConfigError(detail::concat(
        what, is_host ? "this machine has " : "the device has ", approximate_bytes(budget_bytes),
        " left for ",
        num_sharing == 1 ? std::string("it") : detail::concat("each of ", num_sharing, " ranks"),
        is_host ? "" : " beside activations", ". Use more ", is_host ? "machines" : "devices",
        num_sharing == 1 ? "" : ", or fewer ranks on each",
        is_host && !options_.has_nvme
            ? ", or give a directory for what does not fit (nvme.paths, --nvme DIR)"
            : "",
        "; ", budget, " = unlimited trains without this check"));
  }
  const char* more_ranks_or_nvme() const {
    return options_.has_nvme ? ", or use more ranks"
                             : ", use more ranks, or give a directory for what does not fit "
                               "(nvme.paths, --nvme DIR)";
  }

  const CutModel& cut_;
  const MemoryPlanOptions& options_;
  const MemoryCost cost_;

 private:
  std::vector<bool> stays_off_nvme_;  // by id
};

// Roles that may leave memory for NVMe, in the order in which they do.
enum class Leaving : std::uint8_t { kNothing, kStates, kGradients, kParameters };

// Device and host are one memory. What a shard takes there does not depend on where others are, so
// shards are kept one by one.
class OneMemoryPlanner : public Planner {
 public:
  OneMemoryPlanner(const CutModel& cut, std::int64_t num_micro_batches)
      : Planner(cut, num_micro_batches),
        budget_(options_.memory_bytes()),
        in_memory_(placements(Leaving::kNothing)) {}

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
  std::int64_t secondary_bytes() const {
    std::int64_t bytes = 0;
    for (std::size_t id = 0; id < cut_.num_params(); ++id) {
      bytes += taken_bytes(secondary_shard_bytes(cut_, id));
    }
    return bytes;
  }

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
      need.add("parameters", in_memory(Role::kShard) - secondary_bytes());
      need.add("secondary shards", secondary_bytes());
      need.add("gradients", in_memory(Role::kGradient));
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
    need.add("secondary shards", secondary_bytes());
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
};

// How many of the parameters that may leave the device are where, in the order of use.
struct Reach {
  std::size_t parameters_on_device = 0;
  std::size_t states_on_device = 0;
  std::size_t secondary_on_device = 0;  // the rest is in host memory
  // Of those that are not on the device; the rest is on NVMe.
  std::size_t parameters_in_host = 0;
  std::size_t states_in_host = 0;
  double cpu_share = 0;  // of the update, as in assign_updates()
};

// What a reach comes to.
struct Candidate {
  Placements placements;
  Lines lines;  // of shards and gradients
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
};

// A discrete device beside its host. Who updates a shard decides what it takes on either side, and
// depends on where the others are, so reaches are searched for.
class DiscretePlanner : public Planner {
 public:
  DiscretePlanner(const CutModel& cut, std::int64_t num_micro_batches, std::int64_t bucket_bytes,
                  HostGradients host_gradients)
      : Planner(cut, num_micro_batches, host_gradients),
        bucket_bytes_(bucket_bytes),
        sub_group_numel_(std::max(shard::kShardStep,
                                  std::min(options_.sub_group_bytes / 4, kLargestSubGroupNumel) /
                                      shard::kShardStep * shard::kShardStep)),
        // Slots and staging do not depend on placements.
        gradients_(
            gradient_cost(cut, Placements(cut.num_params()), bucket_bytes_, num_micro_batches)),
        most_comm_bytes_(gradients_.staging +
                         GatherCost(cut, bucket_bytes_).staging_bytes(kUnlimited)) {
    check_tiers();
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      if (may_leave_device(i)) {
        large_.push_back(i);
      }
    }
    const Placements least_kept = placements(Reach());
    if (uses_nvme(least_kept) && options_.has_nvme) {
      const OptimizerBuffers optimizer(cut_, least_kept);
      const ParameterBuffers parameters(cut_, least_kept);
      least_pools_ = {optimizer.smallest().bytes, parameters.smallest()};
      const auto within = [this](std::int64_t parts, std::int64_t low, std::int64_t high) {
        return std::clamp(options_.host_bytes / parts, low, std::max(low, high));
      };
      pools_ = {
          within(kOptimizerPoolsPerBudget, least_pools_.optimizer_bytes, optimizer.largest().bytes),
          within(kParameterPoolsPerBudget, least_pools_.parameter_bytes, parameters.largest())};
    }
  }

  std::optional<MemoryPlan> find() const {
    const Reach reach = wanted_reach();
    std::optional<MemoryPlan> found = reach_host(reach, pools_);
    found = found ? std::move(found) : reach_host(least_reach(reach), least_pools_);
    return found ? std::move(found) : reach_host(tight_reach(reach), least_pools_);
  }
  [[noreturn]] void refuse_all() const { refuse_reach(tight_reach(wanted_reach())); }

 private:
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
    const Lines lines = cost_.shard_lines(all, gradients_);
    return {std::move(all), lines};
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
      if (fits_device(wanted, true) && (fits_host(wanted, least_pools_) ||
                                        fits_host(candidate(least_reach(reach)), least_pools_))) {
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

  std::int64_t secondary_bytes(const Placements& placements, Tier tier) const {
    std::int64_t bytes = 0;
    for (std::size_t id = 0; id < placements.size(); ++id) {
      bytes += placements[id].secondary == tier
                   ? charged_bytes(options_, tier == Tier::kHost ? Tier::kPinned : tier,
                                   secondary_shard_bytes(cut_, id))
                   : 0;
    }
    return bytes;
  }

  ByteSum host_need(const Candidate& candidate, const Pools& pools) const {
    const auto& [placements, lines] = candidate;
    const std::int64_t nvme = lines.bytes(Tier::kNvme);
    const auto in_host = [&lines = candidate.lines](Role role) {
      return lines.bytes(Tier::kPinned, role) + lines.bytes(Tier::kHost, role);
    };
    const std::int64_t secondary = secondary_bytes(placements, Tier::kHost);
    ByteSum need;
    need.add("parameters", in_host(Role::kShard) - secondary);
    need.add("secondary shards", secondary);
    need.add("gradients", in_host(Role::kGradient));
    need.add("optimizer states", in_host(Role::kOptimizer));
    need.add("new parameters before their copy to the device", in_host(Role::kStaging));
    need.add("staging of the network's calls", most_comm_bytes_);
    need.add("chunks of shared memory", chunk_bytes(Tier::kHost));
    need.add("buffers of NVMe", nvme == 0 ? 0
                                          : pool_bytes(options_, pools.optimizer_bytes) +
                                                feed_pool_bytes(options_, pools.parameter_bytes));
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
    const auto& [all, lines] = least;
    if (fits_device(least, false)) {
      refuse(host_need(least, least_pools_), "host memory", "memory.host", options_.host_bytes,
             options_.num_host_ranks, more_ranks_or_nvme());
    }
    const SlotNeed slots = slot_need(all, sub_group_numel_);
    const std::int64_t secondary = secondary_bytes(all, Tier::kDevice);
    ByteSum need;
    need.add("parameters", lines.bytes(Tier::kDevice, Role::kShard) - secondary);
    need.add("secondary shards", secondary);
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

  const std::int64_t bucket_bytes_;
  const std::int64_t sub_group_numel_;
  const GradientCost gradients_;
  const std::int64_t most_comm_bytes_;  // of the groups, whatever the arena is
  std::vector<std::size_t> large_;  // ids of those that may leave the device, in the order of use
  Pools least_pools_;
  Pools pools_;  // within the budget
};

}  // namespace

namespace {

// Calls may be staged in host memory, and buckets grow with the device's budget: smaller ones are
// tried, so that a larger device never refuses what a smaller one allowed.
std::vector<std::int64_t> bucket_choices(const CutModel& cut) {
  std::vector<std::int64_t> sizes = {choose_bucket_bytes(cut)};
  for (const std::int64_t bytes : possible_bucket_bytes(cut)) {
    if (cut.options.num_ranks > 1 && bytes < sizes.front()) {
      sizes.push_back(bytes);
    }
  }
  return sizes;
}

// Copies of micro-batches' gradients stay in host memory where nothing else has to leave it for
// them.
MemoryPlan plan_discrete(const CutModel& cut, std::int64_t num_micro_batches) {
  const std::vector<std::int64_t> sizes = bucket_choices(cut);
  const auto find = [&](HostGradients kind) -> std::optional<MemoryPlan> {
    for (const std::int64_t bytes : sizes) {
      if (auto plan = DiscretePlanner(cut, num_micro_batches, bytes, kind).find()) {
        return plan;
      }
    }
    return std::nullopt;
  };
  std::optional<MemoryPlan> plan;
  if (may_keep_copies(cut, num_micro_batches)) {
    plan = find(HostGradients::kCopies);
  }
  const bool may_sum = may_keep_sums(cut, num_micro_batches);
  if (may_sum && (!plan || plan->uses_nvme)) {
    std::optional<MemoryPlan> summed = find(HostGradients::kSums);
    if (!plan || (summed && summed->bytes(Tier::kNvme) < plan->bytes(Tier::kNvme))) {
      plan = std::move(summed);
    }
  }
  if (!plan) {
    DiscretePlanner(cut, num_micro_batches, sizes.back(),
                    may_sum ? HostGradients::kSums : HostGradients::kCopies)
        .refuse_all();
  }
  return std::move(*plan);
}

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
