#include "tessera/planner/cuda_placement.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/planner/cuda_cost.h"
#include "tessera/planner/cuda_refusal.h"
#include "tessera/planner/optimizer_buffers.h"
#include "tessera/planner/parameter_buffers.h"
#include "tessera/planner/update_split.h"
#include "tessera/shard/shard_store.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kLargestSubGroupNumel = std::int64_t{16} << 20;
// Copies of this size run at the link's rate, and so much memory is often free in one piece.
constexpr std::int64_t kLargestSlotNumel = std::int64_t{8} << 20;
// Slots: one comes up, one is updated or goes down. Memory that backward frees does more
// (engine/memory_lender.h), but only what is in slots of our own may go down while the next
// backward runs, when the link has nothing else to do that way. They come after gathered
// parameters, which would go up twice without room.
constexpr std::int64_t kLeastSlots = 2;
constexpr std::int64_t kGoodSlots = 4;
constexpr std::int64_t kManySlots = 6;
constexpr std::int64_t kMostSlots = 10;
// Units in the arena: one is used, others come.
constexpr std::int64_t kGoodUnits = 4;
// Of a host budget, for the buffers of states and of parameters.
constexpr std::int64_t kOptimizerPoolsPerBudget = 8;
constexpr std::int64_t kParameterPoolsPerBudget = 16;

// How many large parameters, in the order of use, are where.
struct Reach {
  std::size_t parameters_on_device = 0;
  std::size_t states_on_device = 0;
  // Of those that are not on the device; the rest is on NVMe.
  std::size_t parameters_in_host = 0;
  std::size_t states_in_host = 0;
};

// What is chosen on the device besides shards.
struct DeviceRoom {
  std::int64_t num_slots = 0;
  std::int64_t arena_bytes = 0;
};

class CudaFiller {
 public:
  CudaFiller(const CutModel& cut, std::int64_t num_micro_batches)
      : cut_(cut),
        options_(cut.options),
        cost_(cut, num_micro_batches),
        sub_group_numel_(std::max(shard::kShardStep,
                                  std::min(options_.sub_group_bytes / 4, kLargestSubGroupNumel) /
                                      shard::kShardStep * shard::kShardStep)) {
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      if (!cost_.is_small(i)) {
        large_.push_back(i);
      }
    }
    wish_parameters();
    check_wishes();
    least_pools_ = least_pools();
  }

  Placement fill();

 private:
  void wish_parameters();
  void check_wishes() const;
  std::vector<ShardPlaces> places_of(const Reach& reach) const;
  Place parameter_place(std::size_t order, const Reach& reach) const;
  Place states_place(std::size_t order, const Reach& reach, Place parameter) const;

  // On the device.
  std::int64_t whole_arena(const std::vector<ShardPlaces>& places) const;
  DeviceRoom least_room(const std::vector<ShardPlaces>& places, const SlotNeed& slots) const;
  DeviceRoom good_room(const std::vector<ShardPlaces>& places, const SlotNeed& slots) const;
  bool fits_device(const Reach& reach, bool with_good_room) const;
  std::size_t most_states_on_device(Reach reach) const;
  void reach_device(Reach& reach) const;
  Reach least_reach(Reach reach) const;
  void give_device_room(Placement& placement) const;

  // In host memory.
  struct Pools {
    std::int64_t optimizer_bytes = 0;
    std::int64_t parameter_bytes = 0;
  };
  Pools least_pools() const;
  Pools pools_within_budget() const;
  static std::int64_t pool_bytes(const Pools& pools);
  std::int64_t host_bytes(const Lines& lines, const Pools& pools) const;
  bool fits_host(const Reach& reach, const Pools& pools) const;
  std::optional<Placement> reach_host(Reach reach, const Pools& pools) const;
  std::optional<Placement> make(const Reach& reach, const Pools& pools) const;
  void give_pools(const Pools& pools, Placement& placement) const;

  [[noreturn]] void refuse(const Reach& reach) const;

  std::int64_t slot_numel() const { return std::min(sub_group_numel_, kLargestSlotNumel); }
  bool is_own_master() const { return optim::is_own_master(cut_.model.dtype); }
  bool keeps_parameters_on_device() const {
    return options_.parameters == Wish::kDevice ||
           (options_.parameters == Wish::kAuto && options_.optimizer == Wish::kDevice &&
            is_own_master());
  }

  const CutModel& cut_;
  const PlacementOptions& options_;
  const CudaCost cost_;
  const std::int64_t sub_group_numel_;
  std::vector<std::size_t> large_;  // ids, in the order of use
  Pools least_pools_;
  std::vector<bool> stays_in_host_;  // by order: where parameters are wished to be on NVMe
};

void CudaFiller::wish_parameters() {
  std::int64_t room = options_.parameters_host_bytes;
  for (const std::size_t id : large_) {
    const auto bytes = static_cast<std::int64_t>(cut_.layouts[id].shard_bytes());
    const bool stays = bytes <= room;
    room -= stays && room != kUnlimited ? bytes : 0;
    stays_in_host_.push_back(stays);
  }
}

void CudaFiller::check_wishes() const {
  TESSERA_CHECK(
      options_.has_nvme ||
          (options_.parameters != Wish::kNvme && options_.optimizer != Wish::kNvme),
      ConfigError,
      "place.parameters and place.optimizer: nvme needs a directory; give one (nvme.paths, "
      "--nvme DIR), or use host");
  TESSERA_CHECK(!is_own_master() || options_.optimizer != Wish::kDevice ||
                    options_.parameters == Wish::kDevice || options_.parameters == Wish::kAuto,
                ConfigError,
                "place.optimizer = device, and place.parameters elsewhere: fp32 parameters are "
                "their own masters, which are updated beside their states; use place.optimizer = "
                "host, or precision = bf16");
}

Place CudaFiller::parameter_place(std::size_t order, const Reach& reach) const {
  if (keeps_parameters_on_device() ||
      (options_.parameters == Wish::kAuto && order < reach.parameters_on_device)) {
    return Place::kDevice;
  }
  const bool may_stay = options_.parameters != Wish::kNvme || stays_in_host_[order];
  return may_stay && order < reach.parameters_in_host ? Place::kHost : Place::kNvme;
}

Place CudaFiller::states_place(std::size_t order, const Reach& reach, Place parameter) const {
  if (!cut_.is_trainable(large_[order]) || options_.optimizer == Wish::kDevice) {
    return Place::kDevice;
  }
  const bool may_be_there = parameter == Place::kDevice || !is_own_master();
  if (options_.optimizer == Wish::kAuto && order < reach.states_on_device && may_be_there) {
    return Place::kDevice;
  }
  const bool is_stored = order >= reach.states_in_host && cost_.num_state_tensors() > 0;
  return is_stored ? Place::kNvme : Place::kHost;
}

std::vector<ShardPlaces> CudaFiller::places_of(const Reach& reach) const {
  std::vector<ShardPlaces> places(cut_.num_params());
  for (std::size_t order = 0; order < large_.size(); ++order) {
    ShardPlaces& each = places[large_[order]];
    each.parameter = parameter_place(order, reach);
    each.states = states_place(order, reach, each.parameter);
  }
  assign_updates(cut_, places);
  return places;
}

std::int64_t CudaFiller::whole_arena(const std::vector<ShardPlaces>& places) const {
  // Alone nothing but memory speaks against holding everything; ranks are there to hold less.
  const bool is_limited = options_.is_live_limit_given || options_.num_ranks > 1;
  return whole_arena_bytes(cut_, places, is_limited ? options_.live_limit_bytes : kUnlimited);
}

DeviceRoom CudaFiller::least_room(const std::vector<ShardPlaces>& places,
                                  const SlotNeed& slots) const {
  return {std::min(kLeastSlots, slots.num_sub_groups), largest_unit(cut_, places).bytes};
}

DeviceRoom CudaFiller::good_room(const std::vector<ShardPlaces>& places,
                                 const SlotNeed& slots) const {
  return {std::min(kGoodSlots, slots.num_sub_groups),
          std::min(kGoodUnits * largest_unit(cut_, places).bytes, whole_arena(places))};
}

bool CudaFiller::fits_device(const Reach& reach, bool with_good_room) const {
  if (options_.device_bytes == kUnlimited) {
    return true;
  }
  const std::vector<ShardPlaces> places = places_of(reach);
  const SlotNeed slots = cost_.slot_need(places, slot_numel());
  const DeviceRoom room = with_good_room ? good_room(places, slots) : least_room(places, slots);
  return cost_.shard_lines(places).bytes(Tier::kDevice) + room.num_slots * slots.slot_bytes +
             room.arena_bytes <=
         options_.device_bytes;
}

// As many as fit, as if host memory held the rest, which is when the device has most to do.
std::size_t CudaFiller::most_states_on_device(Reach reach) const {
  if (options_.optimizer != Wish::kAuto) {
    return 0;
  }
  const auto fits = [&](std::size_t count) {
    reach.states_on_device = count;
    return fits_device(reach, true);
  };
  std::size_t fitting = 0;
  std::size_t too_many = large_.size() + 1;
  while (too_many - fitting > 1) {
    const std::size_t middle = fitting + (too_many - fitting) / 2;
    (fits(middle) ? fitting : too_many) = middle;
  }
  return fitting;
}

void CudaFiller::reach_device(Reach& reach) const {
  const bool may_be_there = options_.parameters == Wish::kAuto && !keeps_parameters_on_device();
  reach.parameters_on_device = may_be_there ? large_.size() : 0;
  for (;; --reach.parameters_on_device) {
    reach.states_on_device = most_states_on_device(reach);
    // There they cost host memory, too, where the processor updates them.
    if (reach.parameters_on_device == 0 ||
        (fits_device(reach, true) &&
         (fits_host(reach, least_pools_) || fits_host(least_reach(reach), least_pools_)))) {
      return;
    }
  }
}

CudaFiller::Pools CudaFiller::least_pools() const {
  Reach nothing;
  const std::vector<ShardPlaces> stored = places_of(nothing);
  if (!uses_nvme(stored) || !options_.has_nvme) {
    return {};
  }
  const ModelShapes model = processor_model(cut_.model, stored);
  return {OptimizerBuffers(CutModel(model, options_), stored).smallest().bytes,
          ParameterBuffers(cut_, stored).smallest()};
}

CudaFiller::Pools CudaFiller::pools_within_budget() const {
  Reach nothing;
  const std::vector<ShardPlaces> stored = places_of(nothing);
  if (!uses_nvme(stored) || !options_.has_nvme) {
    return {};
  }
  const ModelShapes model = processor_model(cut_.model, stored);
  const CutModel processor(model, options_);
  const OptimizerBuffers optimizer(processor, stored);
  const ParameterBuffers parameters(cut_, stored);
  const Pools& least = least_pools_;
  const std::int64_t most_parameters =
      parameters.is_given() ? least.parameter_bytes
                            : std::max(least.parameter_bytes,
                                       whole_pages_below(2 * parameters.largest_stored_unit()));
  const auto within = [this](std::int64_t parts, std::int64_t low, std::int64_t high) {
    return std::clamp(options_.host_bytes / parts, low, std::max(low, high));
  };
  return {within(kOptimizerPoolsPerBudget, least.optimizer_bytes, optimizer.largest().bytes),
          within(kParameterPoolsPerBudget, least.parameter_bytes, most_parameters)};
}

std::int64_t CudaFiller::pool_bytes(const Pools& pools) {
  return pinned_bytes(block_bytes(pools.optimizer_bytes)) +
         pinned_feed_bytes(pools.parameter_bytes);
}

std::int64_t CudaFiller::host_bytes(const Lines& lines, const Pools& pools) const {
  const std::int64_t nvme = lines.bytes(Tier::kNvme);
  std::int64_t bytes =
      lines.bytes(Tier::kPinned) + lines.bytes(Tier::kHost) + cost_.most_comm_bytes();
  if (nvme > 0) {
    bytes += pool_bytes(pools) + (options_.verify ? checksum_bytes(nvme) : 0);
  }
  return bytes;
}

bool CudaFiller::fits_host(const Reach& reach, const Pools& pools) const {
  return options_.host_bytes == kUnlimited ||
         host_bytes(cost_.shard_lines(places_of(reach)), pools) <= options_.host_bytes;
}

std::optional<Placement> CudaFiller::reach_host(Reach reach, const Pools& pools) const {
  const std::size_t most_states = reach.states_in_host;
  const std::size_t least_states = options_.has_nvme ? 0 : most_states;
  const auto attempt = [&](std::size_t states_in_host) {
    reach.states_in_host = states_in_host;
    return fits_device(reach, false) && fits_host(reach, pools) ? make(reach, pools) : std::nullopt;
  };
  for (std::size_t states = most_states + 1; states-- > least_states;) {
    if (auto found = attempt(states)) {
      return found;
    }
  }
  while (options_.has_nvme && reach.parameters_in_host > 0) {
    --reach.parameters_in_host;
    // Without states in host memory there can be more gradients than with all of them.
    for (const std::size_t states : {least_states, most_states}) {
      if (auto found = attempt(states)) {
        return found;
      }
    }
  }
  return std::nullopt;
}

std::optional<Placement> CudaFiller::make(const Reach& reach, const Pools& pools) const {
  Placement placement;
  placement.params = places_of(reach);
  placement.cpu_share = assign_updates(cut_, placement.params);
  placement.on_cuda = true;
  placement.memory_budget_bytes = options_.device_bytes;
  placement.host_budget_bytes = options_.host_bytes;
  placement.sub_group_numel = sub_group_numel_;
  if (uses_nvme(placement.params)) {
    give_pools(pools, placement);
  }
  give_device_room(placement);
  cost_.complete(placement);
  const bool fits = placement.device_memory_bytes() <= options_.device_bytes &&
                    placement.host_memory_bytes() <= options_.host_bytes;
  return fits ? std::optional<Placement>(std::move(placement)) : std::nullopt;
}

void CudaFiller::give_pools(const Pools& pools, Placement& placement) const {
  const ModelShapes model = processor_model(cut_.model, placement.params);
  const CutModel processor(model, options_);
  const OptimizerBuffers::Choice choice =
      OptimizerBuffers(processor, placement.params).choose(taken_bytes(pools.optimizer_bytes));
  placement.sub_group_numel = choice.sub_group_numel;
  const auto lease_bytes = static_cast<std::int64_t>(
      sub_groups(processor, placement.params, choice.sub_group_numel).max_lease_bytes);
  placement.num_optimizer_buffers = lease_bytes > 0 ? choice.num_buffers : 0;
  placement.optimizer_pool_bytes = placement.num_optimizer_buffers * lease_bytes;
  const ParameterBuffers parameters(cut_, placement.params);
  const std::int64_t least = parameters.smallest();
  const std::int64_t most =
      std::max(least, whole_pages_below(2 * parameters.largest_stored_unit()));
  placement.parameter_pool_bytes =
      parameters.is_given() || least < kSmallestPoolBytes
          ? least
          : std::clamp(whole_pages_below(pools.parameter_bytes), least, most);
}

void CudaFiller::give_device_room(Placement& placement) const {
  const std::vector<ShardPlaces>& places = placement.params;
  const SlotNeed slots =
      cost_.slot_need(places, std::min(placement.sub_group_numel, kLargestSlotNumel));
  const std::int64_t whole = whole_arena(places);
  const DeviceRoom least = least_room(places, slots);
  const DeviceRoom good = good_room(places, slots);
  std::int64_t rest = options_.device_bytes - cost_.shard_lines(places).bytes(Tier::kDevice) -
                      least.num_slots * slots.slot_bytes - least.arena_bytes;
  std::int64_t arena = least.arena_bytes;
  const auto grow_arena = [&](std::int64_t wanted) {
    const std::int64_t more =
        std::clamp<std::int64_t>(wanted - arena, 0, std::max<std::int64_t>(rest, 0));
    const std::int64_t grown = more == wanted - arena ? more : whole_pages_below(more);
    arena += grown;
    rest -= grown;
  };
  grow_arena(good.arena_bytes);
  placement.num_update_slots = static_cast<int>(least.num_slots);
  placement.update_slot_bytes = slots.num_sub_groups > 0 ? slots.slot_bytes : 0;
  const auto add_slots = [&](std::int64_t wanted) {
    if (slots.num_sub_groups > 0) {
      const std::int64_t most = std::min(wanted, slots.num_sub_groups) - placement.num_update_slots;
      const std::int64_t more = std::clamp<std::int64_t>(rest / slots.slot_bytes, 0, most);
      placement.num_update_slots += static_cast<int>(more);
      rest -= more * slots.slot_bytes;
    }
  };
  add_slots(kManySlots);
  grow_arena(whole);
  add_slots(kMostSlots);
  placement.arena_bytes = arena;
  const bool is_limited = options_.is_live_limit_given || options_.num_ranks > 1 || whole == 0;
  placement.live_limit_bytes = arena < whole ? arena
                               : is_limited  ? options_.live_limit_bytes
                                             : cost_.gathered_bytes(places);
}

Placement CudaFiller::fill() {
  const std::size_t all = large_.size();
  const bool keeps_states = options_.optimizer != Wish::kNvme || options_.host_bytes != kUnlimited;
  Reach reach;
  reach.parameters_in_host = all;
  reach.states_in_host = keeps_states ? all : 0;
  reach_device(reach);
  if (std::optional<Placement> found = reach_host(reach, pools_within_budget())) {
    return std::move(*found);
  }
  if (std::optional<Placement> found = reach_host(least_reach(reach), least_pools_)) {
    return std::move(*found);
  }
  refuse(reach);
}

// In host memory, whatever may be elsewhere is.
Reach CudaFiller::least_reach(Reach reach) const {
  if (options_.has_nvme) {
    reach.parameters_in_host = 0;
    reach.states_in_host = 0;
  }
  return reach;
}

void CudaFiller::refuse(const Reach& reach) const {
  const std::vector<ShardPlaces> places = places_of(least_reach(reach));
  const Lines lines = cost_.shard_lines(places);
  if (!fits_device(least_reach(reach), false)) {
    const SlotNeed slots = cost_.slot_need(places, slot_numel());
    const DeviceRoom room = least_room(places, slots);
    refuse_device(options_, lines, {room.arena_bytes, room.num_slots * slots.slot_bytes});
  }
  const bool is_stored = lines.bytes(Tier::kNvme) > 0;
  refuse_host(options_, lines, {cost_.most_comm_bytes(), is_stored ? pool_bytes(least_pools_) : 0});
}

}  // namespace

Placement place_on_cuda(const CutModel& cut, std::int64_t num_micro_batches) {
  return CudaFiller(cut, num_micro_batches).fill();
}

}  // namespace tessera::planner
