#include "tessera/planner/placement_fill.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/byte_sum.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/optimizer_buffers.h"
#include "tessera/planner/parameter_buffers.h"
#include "tessera/tier/io_engine.h"

namespace tessera::planner {
namespace {

// More in flight makes no disk faster.
constexpr std::int64_t kLargestGradientPoolBytes = std::int64_t{16} << 20;

// Which roles may leave memory, in the order in which they do.
enum class Level : std::uint8_t { kNothing, kStates, kGradients, kParameters };
constexpr Level kLevels[] = {Level::kNothing, Level::kStates, Level::kGradients,
                             Level::kParameters};

class Filler {
 public:
  explicit Filler(const CutModel& cut)
      : cut_(cut), options_(cut.options), budget_(cut.options.memory_bytes()) {
    wish_places();
  }

  Placement fill() {
    std::optional<ByteSum> least;
    for (const Level level : kLevels) {
      if (level != Level::kNothing && !options_.has_nvme) {
        break;
      }
      ByteSum need;
      if (std::optional<Placement> found = attempt(level, need)) {
        return std::move(*found);
      }
      if (!least || need.total() < least->total()) {
        least = std::move(need);
      }
    }
    refuse(*least);
  }

 private:
  // Places if all that may be in memory is: wishes, and memory for the rest.
  void wish_places();
  // As in memory, but whatever may leave memory at this level is on NVMe.
  std::vector<ShardPlaces> stored_places(Level level) const;
  std::optional<Placement> attempt(Level level, ByteSum& need) const;
  std::optional<Placement> keep_all(ByteSum& need) const;
  std::optional<Placement> keep_all(std::int64_t bucket_bytes, ByteSum& need) const;
  Placement divide(std::int64_t rest, const std::vector<ShardPlaces>& stored,
                   Placement smallest) const;
  void keep_shards(std::int64_t room, std::vector<ShardPlaces>& places) const;
  [[noreturn]] void refuse(const ByteSum& need) const;

  bool is_limited() const { return budget_ != kUnlimited; }
  // Of a shard in memory, at least; of one on NVMe, exactly (with pages of one block). So the bytes
  // on NVMe can be counted against a budget of memory.
  std::int64_t parameter_weight(std::size_t id) const {
    return planner::parameter_weight(cut_.layouts[id]);
  }
  std::int64_t gradient_weight(std::size_t id) const {
    return taken_bytes(block_bytes(4 * cut_.layouts[id].shard_numel()));
  }
  std::int64_t states_weight(std::size_t id) const {
    return taken_bytes(num_state_tensors() * block_bytes(4 * cut_.layouts[id].shard_numel()));
  }
  std::int64_t num_state_tensors() const {
    return static_cast<std::int64_t>(
        optim::num_state_tensors(cut_.model.dtype, options_.num_states));
  }
  bool has_states() const { return num_state_tensors() > 0; }
  std::int64_t largest_gradient_pool() const;
  std::string unit_text(std::size_t unit) const;
  void finish(Placement& placement) const;

  const CutModel& cut_;
  const PlacementOptions& options_;
  const std::int64_t budget_;
  std::vector<ShardPlaces> in_memory_;
  std::vector<bool> parameter_may_leave_;  // at Level::kParameters
};

void Filler::wish_places() {
  std::int64_t host_room = options_.parameters_host_bytes;
  in_memory_.resize(cut_.num_params());
  parameter_may_leave_.assign(cut_.num_params(), options_.parameters == Wish::kAuto);
  for (std::size_t i = 0; i < cut_.num_params(); ++i) {
    const auto shard_bytes = static_cast<std::int64_t>(cut_.layouts[i].shard_bytes());
    ShardPlaces& places = in_memory_[i];
    if (options_.parameters == Wish::kHost) {
      places.parameter = Place::kHost;
    } else if (options_.parameters == Wish::kNvme) {
      const bool stays = shard_bytes <= host_room;
      host_room -= stays && host_room != kUnlimited ? shard_bytes : 0;
      places.parameter = stays || shard_bytes == 0 ? Place::kHost : Place::kNvme;
      parameter_may_leave_[i] = stays;
    }
    if (options_.optimizer == Wish::kHost) {
      places.states = Place::kHost;
    } else if (options_.optimizer == Wish::kNvme && has_states()) {
      places.states = Place::kNvme;
    }
    if (shard_bytes == 0 || !cut_.is_trainable(i)) {
      places.gradient = Place::kDevice;
      places.states = Place::kDevice;
    }
  }
}

std::vector<ShardPlaces> Filler::stored_places(Level level) const {
  std::vector<ShardPlaces> places = in_memory_;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (cut_.layouts[i].shard_numel() == 0) {
      continue;
    }
    if (level >= Level::kParameters && parameter_may_leave_[i]) {
      places[i].parameter = Place::kNvme;
    }
    if (level >= Level::kGradients && cut_.is_trainable(i)) {
      places[i].gradient = Place::kNvme;
    }
    if (level >= Level::kStates && cut_.is_trainable(i) && has_states() &&
        options_.optimizer == Wish::kAuto) {
      places[i].states = Place::kNvme;
    }
  }
  return places;
}

std::int64_t Filler::largest_gradient_pool() const {
  std::int64_t all = 0;
  for (std::size_t i = 0; i < cut_.num_params(); ++i) {
    all += cut_.is_trainable(i) ? gradient_weight(i) : 0;
  }
  return std::max(kSmallestPoolBytes, whole_pages_below(std::min(all, kLargestGradientPoolBytes)));
}

std::string Filler::unit_text(std::size_t unit) const {
  if (unit < cut_.model.unit_names.size()) {
    return detail::concat("arena (unit '", cut_.model.unit_names[unit], "')");
  }
  const std::vector<int>& ids = cut_.model.units[unit];
  return ids.empty()
             ? "arena"
             : detail::concat("arena (the unit of parameter '",
                              cut_.model.params[static_cast<std::size_t>(ids[0])].name, "')");
}

std::optional<Placement> Filler::keep_all(ByteSum& need) const {
  // With the largest buckets that leave room for everything else.
  std::optional<Placement> found;
  for (const std::int64_t bucket_bytes : possible_bucket_bytes(cut_)) {
    need = ByteSum();
    found = keep_all(bucket_bytes, need);
    if (found) {
      break;
    }
  }
  return found;
}

std::optional<Placement> Filler::keep_all(std::int64_t bucket_bytes, ByteSum& need) const {
  Placement placement;
  placement.params = in_memory_;
  placement.bucket_bytes = bucket_bytes;
  placement.sub_group_numel = OptimizerBuffers(cut_, in_memory_).largest_numel();
  const UnitBytes unit = largest_unit(cut_, in_memory_);
  placement.arena_bytes = unit.bytes;
  complete(cut_, 1, placement);
  const auto in_memory = [&placement](Role role) {
    return placement.bytes(Tier::kDevice, role) + placement.bytes(Tier::kHost, role);
  };
  need.add("parameters", in_memory(Role::kShard));
  need.add("gradients", in_memory(Role::kGradient));
  need.add("optimizer states", in_memory(Role::kOptimizer));
  need.add(unit_text(unit.unit), in_memory(Role::kFull));
  need.add("staging of the network's calls", placement.comm_bytes);
  if (need.total() > budget_) {
    return std::nullopt;
  }
  const std::int64_t whole = whole_arena_bytes(cut_, in_memory_, options_.live_limit_bytes);
  placement.arena_bytes =
      GatherCost(cut_, bucket_bytes).grown_arena(unit.bytes, whole, budget_ - need.total());
  placement.live_limit_bytes =
      placement.arena_bytes == whole ? options_.live_limit_bytes : placement.arena_bytes;
  return placement;
}

std::optional<Placement> Filler::attempt(Level level, ByteSum& need) const {
  const std::vector<ShardPlaces> stored = stored_places(level);
  const OptimizerBuffers buffers(cut_, stored);
  if (!uses_nvme(stored)) {
    return keep_all(need);
  }
  const auto is_on_nvme = [](Place place) { return place == Place::kNvme; };
  const bool stores_gradients =
      std::any_of(stored.begin(), stored.end(),
                  [&](const ShardPlaces& each) { return is_on_nvme(each.gradient); });
  Placement smallest;
  smallest.bucket_bytes = choose_bucket_bytes(cut_);
  const UnitBytes unit = largest_unit(cut_, stored);
  smallest.arena_bytes = unit.bytes;
  smallest.parameter_pool_bytes = ParameterBuffers(cut_, stored).smallest();
  smallest.gradient_pool_bytes = stores_gradients ? kSmallestPoolBytes : 0;
  smallest.optimizer_pool_bytes = buffers.smallest().bytes;
  need.add(unit_text(unit.unit), taken_bytes(smallest.arena_bytes));
  const std::int64_t reductions = most_reduction_bytes(cut_, smallest.bucket_bytes);
  need.add("buckets of reductions", reductions);
  need.add("staging of gathers",
           GatherCost(cut_, smallest.bucket_bytes).staging_bytes(smallest.arena_bytes));
  need.add("sums of blocks", gradient_cost(cut_, stored, smallest.bucket_bytes).bytes.block_sums);
  // Two pools, each of whole pages.
  const auto spare = static_cast<std::int64_t>(2 * (device::page_bytes() - tier::kBlockBytes));
  need.add("parameter buffers", taken_bytes(smallest.parameter_pool_bytes) + spare);
  need.add("gradient buffers", taken_bytes(smallest.gradient_pool_bytes));
  need.add("optimizer buffers", taken_bytes(smallest.optimizer_pool_bytes));
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t states = 0;
  std::int64_t on_nvme = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    (is_on_nvme(stored[i].parameter) ? on_nvme : parameters) += parameter_weight(i);
    if (cut_.is_trainable(i)) {
      (is_on_nvme(stored[i].gradient) ? on_nvme : gradients) += gradient_weight(i);
      (is_on_nvme(stored[i].states) ? on_nvme : states) += states_weight(i);
    }
  }
  need.add("checksums", options_.verify ? checksum_bytes(on_nvme) : 0);
  need.add("parameters", parameters);
  need.add("gradients", gradients);
  need.add("optimizer states", states);
  if (need.total() > budget_) {
    return std::nullopt;
  }
  return divide(budget_ - need.total(), stored, std::move(smallest));
}

Placement Filler::divide(std::int64_t rest, const std::vector<ShardPlaces>& stored,
                         Placement placement) const {
  const OptimizerBuffers buffers(cut_, stored);
  const std::int64_t smallest_optimizer = taken_bytes(placement.optimizer_pool_bytes);
  const std::int64_t parameter_growth =
      ParameterBuffers(cut_, stored).largest() - placement.parameter_pool_bytes;
  const std::int64_t gradient_growth = placement.gradient_pool_bytes > 0
                                           ? largest_gradient_pool() - placement.gradient_pool_bytes
                                           : 0;
  const std::int64_t optimizer_growth = taken_bytes(buffers.largest().bytes) - smallest_optimizer;
  const std::int64_t whole = whole_arena_bytes(cut_, stored, options_.live_limit_bytes);
  const std::int64_t arena_wanted =
      is_limited() ? std::min(whole, 2 * placement.arena_bytes) : whole;
  const GatherCost gathers(cut_, placement.bucket_bytes);
  const std::int64_t arena_growth =
      gathers.bytes(arena_wanted) - gathers.bytes(placement.arena_bytes);
  const bool may_keep = stored != in_memory_;
  const std::int64_t speed =
      std::min(may_keep ? rest / 2 : rest,
               parameter_growth + gradient_growth + optimizer_growth + arena_growth);

  const OptimizerBuffers::Choice choice =
      buffers.choose(smallest_optimizer + std::min(speed / 2, optimizer_growth));
  const std::int64_t parameter_more = whole_pages_below(std::min(speed / 4, parameter_growth));
  const std::int64_t gradient_more = whole_pages_below(std::min(speed / 8, gradient_growth));
  const std::int64_t arena_more =
      speed - parameter_more - gradient_more - (taken_bytes(choice.bytes) - smallest_optimizer);
  placement.sub_group_numel = choice.sub_group_numel;
  placement.num_optimizer_buffers = choice.num_buffers;
  placement.parameter_pool_bytes += parameter_more;
  placement.gradient_pool_bytes += gradient_more;
  placement.arena_bytes = gathers.grown_arena(placement.arena_bytes, arena_wanted, arena_more);
  placement.live_limit_bytes =
      placement.arena_bytes == whole ? options_.live_limit_bytes : placement.arena_bytes;
  placement.params = stored;
  keep_shards(rest - speed, placement.params);
  finish(placement);
  return placement;
}

void Filler::keep_shards(std::int64_t room, std::vector<ShardPlaces>& places) const {
  const auto keep = [&room](Place& place, Place in_memory, std::int64_t bytes) {
    if (place != in_memory && bytes <= room) {
      place = in_memory;
      room -= bytes;
    }
  };
  for (const bool small : {true, false}) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto full_bytes = static_cast<std::int64_t>(cut_.layouts[i].full_bytes());
      if ((full_bytes <= kSmallParamBytes) == small) {
        keep(places[i].parameter, in_memory_[i].parameter, parameter_weight(i));
      }
    }
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    keep(places[i].gradient, in_memory_[i].gradient, gradient_weight(i));
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    keep(places[i].states, in_memory_[i].states, states_weight(i));
  }
}

// What turned out not to be stored needs no buffers.
void Filler::finish(Placement& placement) const {
  bool stores_parameters = false;
  bool stores_gradients = false;
  for (const ShardPlaces& each : placement.params) {
    stores_parameters = stores_parameters || each.parameter == Place::kNvme;
    stores_gradients = stores_gradients || each.gradient == Place::kNvme;
  }
  if (!stores_parameters) {
    // The feed of parameters is there, and has nothing to do.
    placement.parameter_pool_bytes = static_cast<std::int64_t>(coordinator::kSmallestLoaderBytes);
  }
  if (!stores_gradients) {
    placement.gradient_pool_bytes = 0;
  }
  const std::int64_t whole = whole_arena_bytes(cut_, placement.params, options_.live_limit_bytes);
  if (whole < placement.arena_bytes) {
    placement.arena_bytes = whole;
    placement.live_limit_bytes = options_.live_limit_bytes;
  }
  const auto lease_bytes = static_cast<std::int64_t>(
      sub_groups(cut_, placement.params, placement.sub_group_numel).max_lease_bytes);
  placement.optimizer_pool_bytes = placement.num_optimizer_buffers * lease_bytes;
  if (lease_bytes == 0) {
    placement.num_optimizer_buffers = 0;
  }
}

void Filler::refuse(const ByteSum& need) const {
  const char* const name =
      options_.device_bytes < options_.host_bytes ? "memory.device" : "memory.host";
  throw ConfigError(detail::concat(
      "the model does not fit: one of ", options_.num_ranks,
      options_.num_ranks == 1 ? " rank" : " ranks", " needs ", approximate_bytes(need.total()),
      ": ", need.text(), "; ", name, " allows ", approximate_bytes(budget_), ". Raise ", name,
      " to at least ", exact_bytes(need.total()),
      options_.has_nvme ? ", or use more ranks"
                        : ", use more ranks, or give a directory for what does "
                          "not fit (nvme.paths, --nvme DIR)"));
}

}  // namespace

Placement fill(const CutModel& cut) { return Filler(cut).fill(); }

}  // namespace tessera::planner
