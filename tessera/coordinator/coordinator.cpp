#include "tessera/coordinator/coordinator.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>
#include <utility>

#include "tessera/comm/tag.h"
#include "tessera/coordinator/encoded_shards.h"
#include "tessera/coordinator/gatherer.h"
#include "tessera/coordinator/prefetcher.h"
#include "tessera/coordinator/secondary_shards.h"
#include "tessera/coordinator/shard_loader.h"
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

Coordinator::Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options)
    : parts_(parts),
      options_(options),
      is_alone_(all_ranks().size() == 1),
      compute_(parts.device.stream(device::StreamKind::kCompute)),
      units_(parts.params) {
  TESSERA_INVARIANT(parts.params.num_ranks() == parts.group.size(), "parameters are cut for ",
                    parts.params.num_ranks(), " ranks, group '", parts.group.name(), "' has ",
                    parts.group.size());
}

Coordinator::~Coordinator() {
  is_resident_ = false;
  release_all();
  if (prefetcher_) {
    prefetcher_->forget_persistent();
    release_all();
  }
}

UnitId Coordinator::add_unit(std::string name, const std::vector<int>& params, UnitTraits traits) {
  return units_.add(std::move(name), params, std::move(traits));
}

void Coordinator::throw_state(const std::string& message, UnitId id) const {
  const UnitInfo& unit = units_[id];
  const std::string first = unit.ids.empty() ? std::string() : parts_.params[unit.ids[0]].name();
  throw StateError(
      first.empty() ? message : detail::concat(message, "; its first parameter is '", first, "'"),
      first, unit.name);
}

void Coordinator::set_tier(const TierOptions& tier) {
  TESSERA_INVARIANT(!units_.is_finalized(), "tiers are set after the first use");
  use_tier(tier);
}

void Coordinator::use_tier(const TierOptions& tier) {
  tier_ = tier;
  options_.budgets.live_limit_bytes = tier.live_limit_bytes;
  if (tier.max_inflight > 0) {
    options_.budgets.max_inflight = tier.max_inflight;
  }
  if (tier.reuse_distance_bytes > 0) {
    options_.budgets.reuse_distance_bytes = tier.reuse_distance_bytes;
  }
}

bool Coordinator::has_loads() const {
  bool has_any = false;
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const Param& param = parts_.params[id];
    TESSERA_INVARIANT(!param.is_on_nvme() || (tier_ && tier_->loader != nullptr), "parameter '",
                      param.name(), "' is on NVMe, and nothing loads it");
    has_any = has_any || param.tier() != Tier::kDevice;
  }
  return has_any;
}

bool Coordinator::has_gathers() const {
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    if (!parts_.params[id].shard_is_full()) {
      return true;
    }
  }
  return false;
}

// With the first use the model is complete: everything that a use needs is prepared.
void Coordinator::finalize() {
  if (units_.is_finalized()) {
    return;
  }
  units_.finalize(parts_.spans);
  seen_versions_.assign(static_cast<std::size_t>(parts_.params.num_params()), 0);
  make_gathers();
}

void Coordinator::forget_copies() {
  TESSERA_INVARIANT(open_.empty() && !is_resident_, "shards are written while they are used");
  if (!gatherer_) {
    return;
  }
  prefetcher_->start_held_back();
  gatherer_->release_idle(std::vector<bool>(seen_versions_.size()));
  gatherer_->wait_for_drops();
  forget_loaded_copies();
  prefetcher_->forget_pass();
}

void Coordinator::drop_gathers() {
  TESSERA_INVARIANT(open_.empty() && !is_resident_ && num_calls_in_flight() == 0,
                    "shards move while they are used");
  consensus_.reset();
  prefetcher_.reset();
  gatherer_.reset();
  secondary_.reset();  // made anew where the next placement says
  own_loader_.reset();
  loader_ = nullptr;
}

void Coordinator::change_tier(const TierOptions& tier) {
  TESSERA_INVARIANT(units_.is_finalized() && !gatherer_, "tiers change while something gathers");
  use_tier(tier);
  units_.follow_placements();
  make_gathers();
}

void Coordinator::make_gathers() {
  const bool has_loads = this->has_loads();
  if (is_alone_ && !has_gathers()) {
    return;
  }
  loader_ = tier_ ? tier_->loader : nullptr;
  if (loader_ == nullptr && has_loads) {
    own_loader_ = std::make_unique<ShardLoader>(parts_.params, parts_.device);
    loader_ = own_loader_.get();
  }
  if (parts_.secondary != nullptr && !secondary_) {
    secondary_ = std::make_unique<SecondaryShards>(*parts_.secondary, parts_.device, parts_.params);
  }
  if (parts_.codec != nullptr && parts_.group.size() > 1 && !encoded_) {
    encoded_ = std::make_unique<EncodedShards>(*parts_.codec, parts_.device, parts_.params);
  }
  const bool needs_consensus = !is_alone_ && (units_.has_dynamic() || options_.uneven_data);
  gatherer_ = std::make_unique<Gatherer>(
      Gatherer::Parts{parts_.group, parts_.device, parts_.params, parts_.clock, parts_.spans,
                      parts_.logger, loader_, parts_.phases, secondary_.get(), encoded_.get()},
      units_.num_units(),
      tier_ ? tier_->arena_bytes : units_.arena_bytes(options_.budgets.live_limit_bytes),
      options_.budgets.max_inflight);
  prefetcher_ = std::make_unique<Prefetcher>(
      Prefetcher::Parts{parts_.params, units_, *gatherer_, loader_, parts_.logger},
      PrefetcherOptions{options_.budgets, options_.persist_param_bytes,
                        options_.persist_model_bytes, options_.max_traces, tier_.has_value(),
                        !needs_consensus});
  if (needs_consensus) {
    std::vector<int> ranks_of_copy = parts_.ranks_of_copy;
    if (ranks_of_copy.empty()) {
      ranks_of_copy.resize(static_cast<std::size_t>(parts_.group.size()));
      std::iota(ranks_of_copy.begin(), ranks_of_copy.end(), 0);
    }
    consensus_ = std::make_unique<Consensus>(
        Consensus::Parts{all_ranks(), parts_.device, parts_.params, units_, *gatherer_,
                         *prefetcher_, gradients_, std::move(ranks_of_copy)});
  }
}

UnitReport Coordinator::report(UnitId id) const {
  UnitReport report;
  report.info = &units_[id];
  report.is_open = std::any_of(open_.begin(), open_.end(),
                               [id](const OpenUse& open) { return open.use.unit == id; });
  if (gatherer_) {
    report.forward = gatherer_->counts(id, Phase::kForward);
    report.backward = gatherer_->counts(id, Phase::kBackward);
    report.inference = gatherer_->counts(id, Phase::kInference);
  }
  return report;
}

bool Coordinator::persists(int param) const { return prefetcher_ && prefetcher_->persists(param); }

bool Coordinator::is_inside_open_leaf(UnitId id) const {
  const UnitId leaf = units_[id].leaf;
  return leaf >= 0 && std::any_of(open_.begin(), open_.end(),
                                  [leaf](const OpenUse& open) { return open.use.unit == leaf; });
}

void Coordinator::begin_use(UnitId id, Phase phase) {
  const UnitInfo& unit = units_[id];
  if (!units_.is_finalized()) [[unlikely]] {
    finalize();
  }
  const Use use{id, phase};
  ++num_uses_;
  if (is_inside_open_leaf(id)) [[unlikely]] {
    open_.push_back({use, OpenKind::kInsideLeaf, 0});
    return;
  }
  attach(unit.direct);
  if (!gatherer_ || is_resident_) {
    open(unit, {use, OpenKind::kResident, 0});
  } else if (unit.traits.dynamic && !is_alone_) {
    begin_dynamic(unit, use);
  } else {
    if (consensus_) {
      consensus_->agree({.kind = Intent::Kind::kStatic, .use = use});
    }
    begin_static(unit, use);
  }
}

void Coordinator::open(const UnitInfo& unit, const OpenUse& use) {
  for (Param* param : unit.params) {
    param->add_user();
  }
  num_static_open_ += use.kind == OpenKind::kStatic ? 1 : 0;
  open_.push_back(use);
}

void Coordinator::begin_static(const UnitInfo& unit, const Use& use) {
  const std::size_t number = prefetcher_->follow_trace(use, num_static_open_ == 0);
  const PlannedUse* planned = prefetcher_->planned();
  const Cause cause{use.unit, use.phase, Reason::kDemand};
  GatherCounts& counts = gatherer_->counts(use.unit, use.phase);
  const std::uint64_t misses_before = counts.misses;
  if (planned != nullptr && !planned->demand.empty()) {
    gatherer_->start(planned->demand, planned->demand_offsets, unit.name, cause);
  }
  gatherer_->start(unit.planned, {}, unit.name, cause);
  if (!unit.mixed.empty() && consensus_) {
    // Some ranks may hold these for a dynamic unit and others not: all gather.
    const std::vector<std::uint8_t> all(static_cast<std::size_t>(parts_.group.size()), 1);
    gatherer_->start_to(unit.mixed, all, unit.name, cause);
  }
  counts.missed_uses += counts.misses > misses_before ? 1 : 0;
  gatherer_->finish(unit.params, unit.label, cause);
  prefetcher_->use_begun(use);
  open(unit, {use, OpenKind::kStatic, number});
}

void Coordinator::begin_dynamic(const UnitInfo& unit, const Use& use) {
  const bool is_there = std::all_of(unit.params.begin(), unit.params.end(), [](const Param* param) {
    return param->state() == ParamState::kAvailable;
  });
  if (!is_there) {
    consensus_->agree({.kind = Intent::Kind::kDynamic, .use = use});
    ++gatherer_->counts(use.unit, use.phase).missed_uses;
    gatherer_->finish(unit.params, unit.label, {use.unit, use.phase, Reason::kDemand});
  }
  open(unit, {use, OpenKind::kDynamic, 0});
}

void Coordinator::end_use(UnitId id, Phase phase) {
  const UnitInfo& unit = units_[id];
  const Use use{id, phase};
  const auto last = std::find_if(open_.rbegin(), open_.rend(),
                                 [&](const OpenUse& open) { return open.use == use; });
  if (last == open_.rend()) {
    throw_state(detail::concat(units_.text_of(use), " ends, but did not begin; ", open_.size(),
                               " uses are open"),
                id);
  }
  const OpenUse ended = *last;
  open_.erase(std::next(last).base());
  if (ended.kind == OpenKind::kInsideLeaf) {
    return;
  }
  if (ended.kind == OpenKind::kStatic) {
    --num_static_open_;
    if (phase != Phase::kBackward && !consensus_) {
      prefetcher_->note_end(ended.number);
    }
  }
  remove_users(unit.params, unit.name, /*changed=*/false);
  if (prefetcher_ && !is_resident_) {
    prefetcher_->use_ended(num_static_open_ == 0);
  }
}

void Coordinator::remove_users(std::span<Param* const> params, const std::string& what,
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
      use_in_place(-full_bytes_of(*param));
    } else if (changed || gatherer_->is_exact_for_once(*param) ||
               (!is_resident_ && !prefetcher_->stays(param->id()))) {
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

void Coordinator::attach(std::span<Param* const> params) {
  for (Param* param : params) {
    if (param->num_users() > 0) {
      continue;
    }
    wait_for_update(*param);
    param->start_gather(param->shard());
    param->finish_gather();
    use_in_place(full_bytes_of(*param));
  }
}

void Coordinator::use_in_place(std::int64_t bytes) {
  own_bytes_ += bytes;
  own_bytes_peak_ = std::max(own_bytes_peak_, own_bytes_);
  if (gatherer_) {
    gatherer_->set_in_place_bytes(own_bytes_);
  }
}

void Coordinator::wait_for_update(const Param& param) {
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

std::vector<Param*> Coordinator::params_of(const std::vector<int>& ids) const {
  std::vector<Param*> params;
  for (const int id : ids) {
    params.push_back(&parts_.params[id]);
  }
  return params;
}

void Coordinator::begin_hold(const std::vector<int>& params, const std::string& what) {
  finalize();
  const std::vector<Param*> held = params_of(params);
  std::vector<Param*> direct;
  std::copy_if(held.begin(), held.end(), std::back_inserter(direct),
               [](const Param* param) { return param->shard_is_full(); });
  attach(direct);
  if (gatherer_) {
    reach_consensus(ConsensusPoint::kHold, what);
    prefetcher_->start_held_back();
    if (!is_resident_) {
      gatherer_->release_quantised(params);
      prefetcher_->make_room_for(params);
    }
    Cause cause;
    cause.exact = true;
    gatherer_->start(params, {}, what, cause);
    gatherer_->finish(held, parts_.spans.intern(what), cause);
  }
  for (Param* param : held) {
    param->add_user();
  }
}

void Coordinator::end_hold(const std::vector<int>& params, const std::string& what, bool changed) {
  remove_users(params_of(params), what, changed);
}

bool Coordinator::begin_resident() {
  finalize();
  if (!open_.empty() || is_resident_) {
    throw_state(is_resident_ ? std::string("parameters are made resident twice")
                             : detail::concat("parameters are made resident inside ",
                                              units_.text_of(open_.back().use)),
                open_.empty() ? 0 : open_.back().use.unit);
  }
  if (gatherer_) {
    if (prefetcher_->planned_bytes() > options_.budgets.live_limit_bytes) {
      return false;
    }
    reach_consensus(ConsensusPoint::kHold, "resident parameters");
    prefetcher_->start_held_back();
    prefetcher_->forget_pass();
    const Cause cause;
    for (std::size_t i = 0; i < units_.num_units(); ++i) {
      const UnitInfo& unit = units_[static_cast<UnitId>(i)];
      gatherer_->start(unit.ids, {}, unit.name, cause);
    }
    for (std::size_t i = 0; i < units_.num_units(); ++i) {
      const UnitInfo& unit = units_[static_cast<UnitId>(i)];
      gatherer_->finish(unit.params, unit.label, cause);
    }
  }
  is_resident_ = true;
  return true;
}

bool Coordinator::is_decoded(int id) const {
  return is_resident_ && gatherer_ && gatherer_->is_encoded(parts_.params[id]);
}

void Coordinator::end_resident() {
  if (!is_resident_ || !open_.empty()) {
    throw StateError(is_resident_ ? detail::concat("parameters cease to be resident inside ",
                                                   units_.text_of(open_.back().use))
                                  : std::string("parameters are not resident"),
                     {}, {});
  }
  is_resident_ = false;
  if (gatherer_) {
    gatherer_->release_idle(prefetcher_->what_stays());
  }
}

void Coordinator::end_step() {
  if (!open_.empty()) {
    throw_state(detail::concat("the step ends inside ", units_.text_of(open_.back().use), "; ",
                               open_.size(), " uses are open"),
                open_.back().use.unit);
  }
  if (is_resident_) {
    throw StateError("the step ends while parameters are resident: their copies would be stale", {},
                     {});
  }
  if (!gatherer_) {
    return;
  }
  prefetcher_->start_held_back();
  const Pending compared = consensus_ || is_alone_ ? Pending() : start_comparing_uses();
  gatherer_->release_idle(std::vector<bool>(seen_versions_.size()));
  // Calls of a group end in their order: on streams that would wait for the device to make all
  // gathers before this one, which nothing here needs.
  if (!all_ranks().is_stream_ordered()) {
    compared.wait();
  }
  gatherer_->wait_for_drops();
  forget_loaded_copies();
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const Param& param = parts_.params[id];
    if (param.state() != ParamState::kReleased) {
      throw StateError(
          detail::concat("the step ends while parameter '", param.name(), "' is ",
                         to_string(param.state()), " with ", param.num_users(), " users"),
          param.name(), {});
    }
  }
  if (encoded_) {
    encoded_->end_step();
  }
  prefetcher_->end_step();
}

// A rank that used other units than the rest is found at its first gather that differs. Where all
// is held there may be none: so ranks compare what they used before anything is made of it. Nothing
// moves but a tag; where uses differ, their names follow. A rank that gave up a pass on its own,
// and went on with the next, may use the same units from there on as the others do: so that is
// compared, too.
Pending Coordinator::start_comparing_uses() {
  const Trace trace = prefetcher_->seen();
  std::vector<comm::Gather> named(trace.uses.size());
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    const std::int32_t use[2] = {trace.uses[i].unit,
                                 static_cast<std::int32_t>(trace.uses[i].phase)};
    hash = comm::hash_bytes(use, sizeof(use), hash);
    named[i].name = units_[trace.uses[i].unit].text;
  }
  comm::CallOptions options;
  const std::string label = "the uses of this step" + given_up_;
  options.label.unit = label;
  options.content_hash = hash;
  return all_ranks().start_all_gather(named, options);
}

// The next update makes them stale. The one before may still hand over values of parameters that
// this step has not used.
void Coordinator::forget_loaded_copies() {
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

void Coordinator::start_ahead() {
  if (prefetcher_ && !is_resident_) {
    prefetcher_->start_ahead();
  }
}

void Coordinator::forget_device_copies() {
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    parts_.params[id].forget_device_copy();
  }
  if (loader_ != nullptr) {
    loader_->forget_device_copies();
  }
}

void Coordinator::release_all() noexcept {
  if (!open_.empty()) {
    ++num_given_up_;
    given_up_ =
        detail::concat(" (", num_given_up_, num_given_up_ == 1 ? " pass was" : " passes were",
                       " given up on this rank because of an exception, the last in ",
                       units_.text_of(open_.back().use), ")");
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
  joined_.reset();
  if (!units_.is_finalized()) {
    return;
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    Param& param = parts_.params[id];
    if (param.num_users() > 0 || !param.shard_is_full()) {
      continue;
    }
    if (param.state() == ParamState::kGathering) {  // the exception came between two moves
      param.drop();
    } else if (param.state() == ParamState::kAvailable) {
      param.release();
      use_in_place(-full_bytes_of(param));
    }
  }
  if (gatherer_) {
    prefetcher_->forget_pass();
    gatherer_->abandon(is_resident_ ? std::vector<bool>(seen_versions_.size(), true)
                                    : prefetcher_->what_stays());
  }
}

bool Coordinator::needs_consensus() {
  finalize();
  return consensus_ != nullptr;
}

void Coordinator::reach_consensus(ConsensusPoint point, std::string_view what) {
  if (!needs_consensus() || is_resident_) {
    return;
  }
  Intent intent;
  intent.kind = Intent::Kind::kPoint;
  intent.point = point;
  intent.detail = static_cast<std::uint32_t>(comm::hash_bytes(what.data(), what.size(), 0));
  consensus_->agree(intent);
}

ConsensusPoint Coordinator::join() {
  finalize();
  if (is_alone_) {
    return ConsensusPoint::kAllDone;
  }
  TESSERA_CHECK(consensus_ != nullptr, ConfigError,
                "this rank has no data, and the others do not ask for it: set "
                "unit.uneven_data=true on all ranks, so that they agree on every unit");
  for (;;) {
    if (const std::optional<Use> use = std::exchange(joined_, std::nullopt)) {
      end_use(use->unit, use->phase);
    }
    const Intent agreed = consensus_->agree({});
    if (agreed.kind == Intent::Kind::kJoin) {
      return ConsensusPoint::kAllDone;
    }
    if (agreed.kind == Intent::Kind::kPoint) {
      return agreed.point;
    }
    begin_static(units_[agreed.use.unit], agreed.use);
    joined_ = agreed.use;
  }
}

TraceMode Coordinator::trace_mode() const {
  return prefetcher_ ? prefetcher_->mode() : TraceMode::kRecord;
}

CoordinatorStats Coordinator::take_stats() {
  CoordinatorStats stats;
  stats.num_uses = std::exchange(num_uses_, 0);
  stats.full_bytes_peak = std::exchange(own_bytes_peak_, own_bytes_);
  if (gatherer_) {
    gatherer_->take_stats(stats);
  }
  if (encoded_) {
    stats.quant_error = encoded_->error();
  }
  if (consensus_) {
    stats.num_consensus_rounds = consensus_->take_num_rounds();
  }
  return stats;
}

std::int64_t Coordinator::full_bytes() const {
  return own_bytes_ + (gatherer_ ? gatherer_->full_bytes() : 0);
}

std::int64_t Coordinator::unused_bytes() const {
  std::int64_t bytes = 0;
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const Param& param = parts_.params[id];
    if (param.state() != ParamState::kReleased && param.num_users() == 0) {
      bytes += full_bytes_of(param);
    }
  }
  return bytes;
}

std::size_t Coordinator::num_calls_in_flight() const {
  return gatherer_ ? gatherer_->num_calls() : 0;
}

std::size_t Coordinator::arena_bytes() const { return gatherer_ ? gatherer_->arena_bytes() : 0; }

}  // namespace tessera::coordinator
