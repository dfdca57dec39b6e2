#include "tessera/coordinator/coordinator.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/coordinator/coordinator_impl.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;
using shard::ParamState;

CoordinatorOptions CoordinatorOptions::from(const Config& config) {
  CoordinatorOptions options;
  options.budgets.bucket_bytes = config.get_bytes("prefetch.bucket_bytes");
  options.budgets.max_inflight = static_cast<int>(config.get_int("prefetch.max_inflight"));
  options.budgets.live_limit_bytes = config.get_bytes("live.limit_bytes");
  options.budgets.reuse_distance_bytes = config.get_bytes("live.reuse_distance_bytes");
  options.persist_param_bytes = config.get_bytes("persist.param_bytes");
  options.persist_model_bytes = config.get_bytes("persist.model_bytes");
  options.uneven_data = config.get_bool("unit.uneven_data");
  return options;
}

Coordinator::Impl::Impl(const CoordinatorParts& parts, const CoordinatorOptions& options)
    : parts_(parts),
      options_(options),
      is_alone_(parts.group.size() == 1),
      units_(parts.params),
      compute_(parts.device.stream(device::StreamKind::kCompute)),
      book_(options.max_traces) {
  TESSERA_INVARIANT(parts.params.num_ranks() == parts.group.size(), "parameters are cut for ",
                    parts.params.num_ranks(), " ranks, group '", parts.group.name(), "' has ",
                    parts.group.size());
}

Coordinator::Impl::~Impl() {
  resident_ = false;
  abandon();
  persists_.assign(persists_.size(), false);
  abandon();
}

std::string Coordinator::Impl::text_of(const Use& use) const {
  return detail::concat("the ", to_string(use.phase), " of unit '", units_[use.unit].name, "'");
}

void Coordinator::Impl::throw_state(const std::string& message, const UnitInfo& unit) const {
  const std::string first = unit.ids.empty() ? std::string() : parts_.params[unit.ids[0]].name();
  throw StateError(
      first.empty() ? message : detail::concat(message, "; its first parameter is '", first, "'"),
      first, unit.name);
}

// With the first use the model is complete: everything that a use needs is prepared.
void Coordinator::Impl::seal() {
  if (units_.is_sealed()) {
    return;
  }
  units_.seal(parts_.spans);
  const std::vector<std::int64_t> bytes = units_.param_bytes();
  persists_.assign(bytes.size(), false);
  is_wanted_ = persists_;
  seen_versions_.assign(bytes.size(), 0);
  const bool has_loads = this->has_loads();
  if (is_alone_ && !has_loads) {
    return;
  }
  loader_ = tier_ ? tier_->loader : nullptr;
  if (loader_ == nullptr && has_loads) {
    own_loader_ = std::make_unique<ShardLoader>(parts_.params, parts_.device);
    loader_ = own_loader_.get();
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    if (parts_.params[id].dynamic()) {
      dynamic_params_.push_back(id);
    }
  }
  meets_ = !is_alone_ && (units_.has_dynamic() || options_.uneven_data);
  if (meets_) {
    meeting_ = std::make_unique<Meeting>(parts_.group, parts_.device, dynamic_params_.size());
  }
  // What nobody plans for must find room beside what is planned.
  plan_budgets_ = options_.budgets;
  plan_budgets_.live_limit_bytes = std::max<std::int64_t>(
      0, plan_budgets_.live_limit_bytes - units_.largest_bytes(/*dynamic=*/true));
  const std::int64_t room =
      room_to_persist(plan_budgets_.live_limit_bytes, units_.largest_bytes(/*dynamic=*/false));
  persists_ =
      choose_persistent(bytes, options_.persist_param_bytes, options_.persist_model_bytes, room);
  for (std::size_t i = 0; i < units_.num_units() && !is_alone_; ++i) {
    const UnitInfo& unit = units_[static_cast<UnitId>(i)];
    for (const int id : unit.traits.dynamic ? unit.ids : unit.mixed) {
      persists_[static_cast<std::size_t>(id)] = false;
    }
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    if (parts_.params[id].shard_is_full()) {
      persists_[static_cast<std::size_t>(id)] = false;
    }
  }
  unit_params_ = units_.planned_ids();
  for (std::size_t i = 0; i < units_.num_units(); ++i) {
    const UnitInfo& unit = units_[static_cast<UnitId>(i)];
    unit_texts_.push_back(
        unit.ids.empty() ? unit.name
                         : detail::concat(unit.name, " (", parts_.params[unit.ids[0]].name(), ")"));
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    // Where the arena is all there is, what rounding takes of it counts.
    const auto rounded =
        static_cast<std::int64_t>(device::round_to_arena(static_cast<std::size_t>(bytes[i])));
    plan_params_.push_back({tier_ ? rounded : bytes[i], persists_[i]});
  }
  say_what_cannot_be_prefetched();
  const std::size_t arena_bytes =
      tier_ ? tier_->arena_bytes : units_.arena_bytes(options_.budgets.live_limit_bytes);
  gatherer_ = std::make_unique<Gatherer>(
      Gatherer::Parts{parts_.group, parts_.device, parts_.params, parts_.clock, parts_.spans,
                      parts_.logger, loader_},
      units_.num_units(), arena_bytes, options_.budgets.max_inflight);
  is_wanted_ = persists_;
}

void Coordinator::Impl::set_tier(const TierOptions& tier) {
  TESSERA_INVARIANT(!units_.is_sealed(), "tiers are set after the first use");
  tier_ = tier;
  options_.budgets.live_limit_bytes = tier.live_limit_bytes;
  if (tier.max_inflight > 0) {
    options_.budgets.max_inflight = tier.max_inflight;
  }
  if (tier.reuse_distance_bytes > 0) {
    options_.budgets.reuse_distance_bytes = tier.reuse_distance_bytes;
  }
}

bool Coordinator::Impl::has_loads() const {
  bool has_any = false;
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const Param& param = parts_.params[id];
    TESSERA_INVARIANT(!param.is_on_nvme() || (tier_ && tier_->loader != nullptr), "parameter '",
                      param.name(), "' is on NVMe, and nothing loads it");
    has_any = has_any || param.tier() != Tier::kDevice;
  }
  return has_any;
}

// No error, and no wrong number; but somebody who reads the misses should know their reason.
void Coordinator::Impl::say_what_cannot_be_prefetched() const {
  const PlanBudgets& budgets = options_.budgets;
  for (std::size_t i = 0; i < unit_params_.size() && budgets.bucket_bytes > 0; ++i) {
    int num_calls = 0;
    std::int64_t call_bytes = budgets.bucket_bytes;
    for (const int id : unit_params_[i]) {
      const std::int64_t bytes = plan_params_[static_cast<std::size_t>(id)].full_bytes;
      const bool joins = num_calls > 0 && bytes <= budgets.bucket_bytes - call_bytes;
      num_calls += joins ? 0 : 1;
      call_bytes = joins ? call_bytes + bytes : bytes;
    }
    if (num_calls > budgets.max_inflight) {
      parts_.logger.once("prefetch in part", LogLevel::kInfo, "unit '",
                         units_[static_cast<UnitId>(i)].name, "' needs ", num_calls,
                         " gathers of at most prefetch.bucket_bytes=", budgets.bucket_bytes,
                         ", and prefetch.max_inflight=", budgets.max_inflight,
                         ": what is left of it is gathered on demand; raise either to prefetch all "
                         "of it");
      return;
    }
  }
}

bool Coordinator::Impl::is_inside_open_leaf(const UnitInfo& unit) const {
  return unit.leaf >= 0 && std::any_of(open_.begin(), open_.end(), [&](const OpenUse& open) {
           return open.use.unit == unit.leaf;
         });
}

void Coordinator::Impl::begin_use(UnitId id, Phase phase) {
  const UnitInfo& unit = units_[id];
  if (!units_.is_sealed()) [[unlikely]] {
    seal();
  }
  const Use use{id, phase};
  ++num_uses_;
  if (is_inside_open_leaf(unit)) [[unlikely]] {
    open_.push_back({use, OpenKind::kInsideLeaf, 0});
    return;
  }
  attach(unit.direct);
  if (!gatherer_ || resident_) {
    open(unit, {use, OpenKind::kResident, 0});
  } else if (unit.traits.dynamic && !is_alone_) {
    begin_dynamic(unit, use);
    open(unit, {use, OpenKind::kDynamic, 0});
  } else {
    if (meets_) {
      Intent intent;
      intent.kind = Intent::Kind::kStatic;
      intent.use = use;
      agree(intent);
    }
    begin_static(unit, use);
    open(unit, {use, OpenKind::kStatic, book_.position() - 1});
  }
}

void Coordinator::Impl::open(const UnitInfo& unit, const OpenUse& use) {
  for (Param* param : unit.params) {
    param->add_user();
  }
  num_static_open_ += use.kind == OpenKind::kStatic ? 1 : 0;
  open_.push_back(use);
}

void Coordinator::Impl::begin_static(const UnitInfo& unit, const Use& use) {
  // Whatever the last use left is started now, also if this use departs: other ranks may have had
  // the room to start it then.
  start_prefetches(RoomCheck::kSkipped);
  follow_trace(use);
  gather(unit, use);
}

void Coordinator::Impl::gather(const UnitInfo& unit, const Use& use) {
  const PlannedUse* planned =
      book_.mode() == TraceMode::kComplete ? &plan_->uses[book_.position() - 1] : nullptr;
  const Cause cause{use.unit, use.phase, Reason::kDemand};
  GatherCounts& counts = gatherer_->counts(use.unit, use.phase);
  const std::uint64_t misses_before = counts.misses;
  if (planned != nullptr && !planned->demand.empty()) {
    gatherer_->start(planned->demand, planned->demand_offsets, unit.name, cause);
  }
  gatherer_->start(unit.planned, {}, unit.name, cause);
  if (!unit.mixed.empty() && meets_) {
    // Some ranks may hold these for a dynamic unit and others not: all gather.
    const std::vector<std::uint8_t> all(static_cast<std::size_t>(parts_.group.size()), 1);
    gatherer_->start_to(unit.mixed, all, unit.name, cause);
  }
  counts.missed_uses += counts.misses > misses_before ? 1 : 0;
  gatherer_->finish(unit.params, unit.label, cause);
  for (const int id : unit.planned) {
    const auto i = static_cast<std::size_t>(id);
    is_wanted_[i] = planned != nullptr || persists_[i];
  }
  running_ = use;
  queue_prefetches(planned);
  start_prefetches(RoomCheck::kHeeded);
  read_ahead();
}

void Coordinator::Impl::end_use(UnitId id, Phase phase) {
  const UnitInfo& unit = units_[id];
  const Use use{id, phase};
  auto open = open_.end();
  while (open != open_.begin() && std::prev(open)->use != use) {
    --open;
  }
  if (open == open_.begin()) {
    throw_state(
        detail::concat(text_of(use), " ends, but did not begin; ", open_.size(), " uses are open"),
        unit);
  }
  const OpenUse ended = *std::prev(open);
  open_.erase(std::prev(open));
  if (ended.kind == OpenKind::kInsideLeaf) {
    return;
  }
  if (ended.kind == OpenKind::kStatic) {
    --num_static_open_;
    if (phase != Phase::kBackward && !meets_) {
      book_.note_end(ended.index);
    }
  }
  remove_users(unit.params, unit.name, /*changed=*/false);
  if (gatherer_ && !resident_) {
    start_prefetches(RoomCheck::kHeeded);
    start_next_pass_if_foreseen();
  }
}

void Coordinator::Impl::remove_users(std::span<Param* const> params, const std::string& what,
                                     bool changed) {
  std::exception_ptr written;
  std::optional<Pending> computed;
  for (Param* param : params) {
    try {
      param->remove_user(what);
    } catch (const ConfigError&) {
      written = std::current_exception();
    }
    if (param->num_users() > 0) {
      continue;
    }
    if (param->shard_is_full()) {
      param->release();
      own_bytes_ -= full_bytes_of(*param);
    } else if (changed || !is_wanted_[index_of(*param)]) {
      if (!computed) {
        computed = gatherer_->computed();
      }
      gatherer_->release(*param, *computed);
    }
  }
  if (written) {
    std::rethrow_exception(written);
  }
}

void Coordinator::Impl::attach(std::span<Param* const> params) {
  for (Param* param : params) {
    if (param->num_users() > 0) {
      continue;
    }
    wait_for_update(*param);
    param->start_gather(param->shard());
    param->finish_gather();
    own_bytes_ += full_bytes_of(*param);
  }
  own_bytes_peak_ = std::max(own_bytes_peak_, own_bytes_);
}

void Coordinator::Impl::wait_for_update(const Param& param) {
  std::uint64_t& seen = seen_versions_[index_of(param)];
  if (seen == param.version()) {
    return;
  }
  if (compute_.runs_on_caller()) {
    param.updated().wait();
  } else {
    compute_.wait(param.updated());
  }
  seen = param.version();
}

void Coordinator::Impl::release_unwanted() {
  const Pending computed = gatherer_->computed();
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    Param& param = parts_.params[id];
    // What is direct goes with its use; one that is about to begin has no user yet.
    if (is_wanted_[static_cast<std::size_t>(id)] || param.num_users() > 0 ||
        param.shard_is_full()) {
      continue;
    }
    if (param.state() == ParamState::kGathering) {
      gatherer_->drop(param);
    } else if (param.state() == ParamState::kAvailable) {
      gatherer_->release(param, computed);
    }
  }
}

void Coordinator::Impl::end_step() {
  if (!open_.empty()) {
    throw_state(detail::concat("the step ends inside ", text_of(open_.back().use), "; ",
                               open_.size(), " uses are open"),
                units_[open_.back().use.unit]);
  }
  if (resident_) {
    throw StateError("the step ends while parameters are resident: their copies would be stale", {},
                     {});
  }
  if (gatherer_) {
    start_prefetches(RoomCheck::kSkipped);
    const Pending compared = meets_ || is_alone_ ? Pending() : start_comparing_uses();
    is_wanted_.assign(is_wanted_.size(), false);
    release_unwanted();
    compared.wait();
    gatherer_->wait_for_drops();
    forget_stored_copies();
    for (int id = 0; id < parts_.params.num_params(); ++id) {
      const Param& param = parts_.params[id];
      if (param.state() != ParamState::kReleased) {
        throw StateError(
            detail::concat("the step ends while parameter '", param.name(), "' is ",
                           to_string(param.state()), " with ", param.num_users(), " users"),
            param.name(), {});
      }
    }
    is_wanted_ = persists_;
    ahead_of_ = kNoTrace;
    plan_ = nullptr;
  }
  book_.end_pass(/*by_step=*/true);
}

// The update that comes makes them stale. The one before may still hand over values of parameters
// that this step has not used.
void Coordinator::Impl::forget_stored_copies() {
  if (loader_ == nullptr) {
    return;
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    if (parts_.params[id].is_on_nvme()) {
      wait_ignoring_failure(parts_.params[id].updated());
    }
  }
  loader_->forget_all();
}

void Coordinator::Impl::abandon() noexcept {
  if (!open_.empty()) {
    ++num_given_up_;
    given_up_ =
        detail::concat(" (", num_given_up_, num_given_up_ == 1 ? " pass was" : " passes were",
                       " given up on this rank because of an exception, the last in ",
                       text_of(open_.back().use), ")");
  }
  for (const OpenUse& open : open_) {
    if (open.kind != OpenKind::kInsideLeaf) {
      for (Param* param : units_[open.use.unit].params) {
        param->forget_user();
      }
    }
  }
  open_.clear();
  num_static_open_ = 0;
  queue_.clear();
  followed_.reset();
  plan_ = nullptr;
  ahead_of_ = kNoTrace;
  book_.forget_pass();
  if (!units_.is_sealed()) {
    return;
  }
  is_wanted_ = persists_;
  if (resident_) {
    is_wanted_.assign(is_wanted_.size(), true);
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    Param& param = parts_.params[id];
    if (param.num_users() > 0) {
      continue;
    }
    if (!param.shard_is_full()) {
      if (param.state() == ParamState::kGathering) {
        gatherer_->finish_and_drop(param);
      }
    } else if (param.state() == ParamState::kGathering) {  // the exception came between two moves
      param.drop();
    } else if (param.state() == ParamState::kAvailable) {
      param.release();
      own_bytes_ -= full_bytes_of(param);
    }
  }
  if (gatherer_) {
    release_unwanted();
    gatherer_->finish_drops();
  }
}

std::int64_t Coordinator::Impl::unused_bytes() const {
  std::int64_t bytes = 0;
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const Param& param = parts_.params[id];
    if (param.state() != ParamState::kReleased && param.num_users() == 0) {
      bytes += full_bytes_of(param);
    }
  }
  return bytes;
}

}  // namespace tessera::coordinator
