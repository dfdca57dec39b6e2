#include "tessera/coordinator/coordinator.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <span>
#include <utility>

#include "tessera/coordinator/gatherer.h"
#include "tessera/coordinator/unit_table.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {
namespace {

using device::Pending;
using shard::Param;
using shard::ParamState;

struct OpenUse {
  Use use;
  std::uint64_t number = 0;  // uses begun up to this one
};

}  // namespace

CoordinatorOptions CoordinatorOptions::from(const Config& config) {
  CoordinatorOptions options;
  options.budgets.bucket_bytes = config.get_bytes("prefetch.bucket_bytes");
  options.budgets.max_inflight = static_cast<int>(config.get_int("prefetch.max_inflight"));
  options.budgets.live_limit_bytes = config.get_bytes("live.limit_bytes");
  options.budgets.reuse_distance_bytes = config.get_bytes("live.reuse_distance_bytes");
  options.persist_param_bytes = config.get_bytes("persist.param_bytes");
  options.persist_model_bytes = config.get_bytes("persist.model_bytes");
  return options;
}

class Coordinator::Impl {
 public:
  Impl(const CoordinatorParts& parts, const CoordinatorOptions& options)
      : parts_(parts),
        options_(options),
        is_alone_(parts.group.size() == 1),
        units_(parts.params),
        compute_(parts.device.stream(device::StreamKind::kCompute)) {
    TESSERA_INVARIANT(parts.params.num_ranks() == parts.group.size(), "parameters are cut for ",
                      parts.params.num_ranks(), " ranks, group '", parts.group.name(), "' has ",
                      parts.group.size());
  }

  ~Impl() {
    abandon_step();
    persists_.assign(persists_.size(), false);
    abandon_step();
  }

  UnitTable& units() { return units_; }

  void begin_use(UnitId id, Phase phase) {
    const UnitInfo& unit = units_[id];
    if (!units_.is_sealed()) [[unlikely]] {
      seal();
    }
    const Use use{id, phase};
    if (is_alone_) {
      trace_.advance(use);
      attach(unit.params);
    } else {
      // Whatever the last use left is started now, also if this use departs: other ranks may have
      // had the room to start it then.
      start_prefetches(RoomCheck::kSkipped);
      const bool was_complete = trace_.mode() == TraceMode::kComplete;
      if (!trace_.advance(use) && was_complete) {
        depart(use);
      }
      gather(unit);
    }
    // Nothing below throws: a use is open as a whole, or not at all.
    for (Param* param : unit.params) {
      param->add_user();
    }
    ++num_begun_;
    ++num_uses_;
    open_.push_back({use, num_begun_});
  }

  void end_use(UnitId id, Phase phase) {
    const UnitInfo& unit = units_[id];
    const Use use{id, phase};
    auto open = open_.end();
    while (open != open_.begin() && std::prev(open)->use != use) {
      --open;
    }
    TESSERA_INVARIANT(open != open_.begin(), "the ", to_string(phase), " of unit '", unit.name,
                      "' ends, but did not begin; ", open_.size(), " uses are open",
                      first_param_text(unit));
    open_.erase(std::prev(open));
    if (is_alone_) {
      detach(unit);
      return;
    }
    std::optional<Pending> computed;
    for (Param* param : unit.params) {
      param->remove_user(unit.name);
      if (param->num_users() == 0 && !is_wanted_[index_of(*param)]) {
        if (!computed) {
          computed = gatherer_->computed();
        }
        gatherer_->release(*param, *computed);
      }
    }
    start_prefetches(RoomCheck::kHeeded);
  }

  void begin_hold(const std::vector<int>& params, const std::string& what) {
    if (!units_.is_sealed()) {
      seal();
    }
    std::vector<Param*> held;
    for (const int id : params) {
      held.push_back(&parts_.params[id]);
    }
    if (is_alone_) {
      attach(held);
    } else {
      start_prefetches(RoomCheck::kSkipped);
      gatherer_->start(params, what, Gatherer::Reason::kDemand);
      gatherer_->finish(held, parts_.spans.intern(what));
    }
    for (Param* param : held) {
      param->add_user();
    }
  }

  void end_hold(const std::vector<int>& params, const std::string& what, bool changed) {
    std::exception_ptr failure;
    for (const int id : params) {
      Param& param = parts_.params[id];
      try {
        param.remove_user(what);
      } catch (const ConfigError&) {
        failure = std::current_exception();
      }
      if (param.num_users() > 0) {
        continue;
      }
      if (is_alone_) {
        param.release();
        own_bytes_ -= full_bytes_of(param);
      } else if (changed || !is_wanted_[index_of(param)]) {
        gatherer_->release(param, gatherer_->computed());
      }
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  void end_step() {
    TESSERA_INVARIANT(open_.empty(), "the step ends inside the ", to_string(open_.back().use.phase),
                      " of unit '", units_[open_.back().use.unit].name, "'; ", open_.size(),
                      " uses are open");
    if (gatherer_) {
      held_back_ = nullptr;
      is_wanted_.assign(is_wanted_.size(), false);
      release_unwanted();
      gatherer_->wait_for_drops();
    }
    const bool is_new = trace_.mode() == TraceMode::kRecord;
    trace_.end_step();
    if (gatherer_ && is_new && trace_.mode() == TraceMode::kComplete) {
      make_new_plan();
    }
  }

  void abandon_step() noexcept {
    for (const OpenUse& open : open_) {
      for (Param* param : units_[open.use.unit].params) {
        param->forget_users();
      }
    }
    open_.clear();
    held_back_ = nullptr;
    trace_.invalidate();
    trace_.end_step();
    if (!units_.is_sealed()) {
      return;
    }
    is_wanted_ = persists_;
    for (int id = 0; id < parts_.params.num_params(); ++id) {
      Param& param = parts_.params[id];
      if (param.num_users() > 0) {
        continue;
      }
      if (is_alone_) {
        finish_and_detach(param);
      } else if (param.state() == ParamState::kGathering) {
        gatherer_->finish_and_drop(param);
      }
    }
    if (gatherer_) {
      release_unwanted();
      gatherer_->finish_drops();
    }
  }

  TraceMode trace_mode() const { return trace_.mode(); }
  std::int64_t full_bytes() const { return gatherer_ ? gatherer_->full_bytes() : own_bytes_; }
  std::size_t arena_bytes() const { return gatherer_ ? gatherer_->arena_bytes() : 0; }

  CoordinatorStats take_stats() {
    CoordinatorStats stats;
    stats.num_uses = std::exchange(num_uses_, 0);
    stats.full_bytes_peak = std::exchange(own_bytes_peak_, own_bytes_);
    if (gatherer_) {
      const GathererStats gathered = gatherer_->take_stats();
      stats.prefetch_hits = gathered.prefetch_hits;
      stats.prefetch_misses = gathered.prefetch_misses;
      stats.prefetch_drops = gathered.prefetch_drops;
      stats.num_gathers = gathered.num_gathers;
      stats.gathered_bytes = gathered.gathered_bytes;
      stats.exposed_wait_s = gathered.exposed_wait_s;
      stats.full_bytes_peak = gathered.full_bytes_peak;
      const std::uint64_t overflows = gatherer_->num_overflows();
      stats.arena_overflows = overflows - std::exchange(overflows_taken_, overflows);
    }
    return stats;
  }

 private:
  enum class RoomCheck : std::uint8_t { kHeeded, kSkipped };

  static std::size_t index_of(const Param& param) { return static_cast<std::size_t>(param.id()); }
  static std::string first_param_text(const UnitInfo& unit) {
    return unit.params.empty()
               ? std::string()
               : detail::concat("; its first parameter is '", unit.params.front()->name(), "'");
  }

  // With the first use the model is complete: everything that a use needs is prepared.
  void seal() {
    units_.seal(parts_.spans);
    const std::vector<std::int64_t> bytes = units_.param_bytes();
    persists_.assign(bytes.size(), false);
    if (is_alone_) {
      seen_versions_.assign(bytes.size(), 0);
    } else {
      const std::int64_t limit = options_.budgets.live_limit_bytes;
      persists_ = choose_persistent(bytes, options_.persist_param_bytes,
                                    options_.persist_model_bytes, limit);
      gatherer_ = std::make_unique<Gatherer>(
          Gatherer::Parts{parts_.group, parts_.device, parts_.params, parts_.clock, parts_.spans},
          units_.arena_bytes(limit));
    }
    is_wanted_ = persists_;
  }

  // A group of one: the shard is the parameter. No list, no plan, no event.
  void attach(std::span<Param* const> params) {
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

  void wait_for_update(const Param& param) {
    std::uint64_t& seen = seen_versions_[index_of(param)];
    if (seen == param.version()) {
      return;
    }
    if (compute_.native_handle() == nullptr) {
      param.updated().wait();
    } else {
      compute_.wait(param.updated());
    }
    seen = param.version();
  }

  void detach(const UnitInfo& unit) {
    for (Param* param : unit.params) {
      param->remove_user(unit.name);
      if (param->num_users() == 0) {
        param->release();
        own_bytes_ -= full_bytes_of(*param);
      }
    }
  }

  // After an exception, which may have come between any two moves.
  void finish_and_detach(Param& param) {
    if (param.state() == ParamState::kGathering) {
      param.drop();
    } else if (param.state() == ParamState::kAvailable) {
      param.release();
      own_bytes_ -= full_bytes_of(param);
    }
  }

  void gather(const UnitInfo& unit) {
    gatherer_->start(unit.ids, unit.name, Gatherer::Reason::kDemand);
    gatherer_->finish(unit.params, unit.label);
    if (trace_.mode() != TraceMode::kComplete) {
      for (const int id : unit.ids) {
        is_wanted_[static_cast<std::size_t>(id)] = persists_[static_cast<std::size_t>(id)];
      }
      return;
    }
    const PlannedUse& planned = plan_.uses[trace_.position() - 1];
    for (const int id : unit.ids) {
      is_wanted_[static_cast<std::size_t>(id)] = true;
    }
    for (const int id : planned.release) {
      is_wanted_[static_cast<std::size_t>(id)] = false;
    }
    for (const GatherList& list : planned.prefetch) {
      for (const int id : list) {
        is_wanted_[static_cast<std::size_t>(id)] = true;
      }
    }
    held_back_ = planned.prefetch.empty() ? nullptr : &planned;
    next_call_ = 0;
    running_bytes_ = unit.bytes;
    running_number_ = num_begun_ + 1;
    start_prefetches(RoomCheck::kHeeded);
  }

  // See [Note: overlapping uses].
  void start_prefetches(RoomCheck check) {
    if (held_back_ == nullptr) {
      return;
    }
    for (; next_call_ < held_back_->prefetch.size(); ++next_call_) {
      const GatherList& list = held_back_->prefetch[next_call_];
      if (check == RoomCheck::kHeeded && !has_room_for(list)) {
        return;
      }
      gatherer_->start(list, units_.owner_of(list.front()).name, Gatherer::Reason::kPrefetch);
    }
    held_back_ = nullptr;
  }

  bool has_room_for(const GatherList& list) const {
    std::int64_t bytes = gatherer_->full_bytes();
    for (const int id : list) {
      if (parts_.params[id].state() == ParamState::kReleased) {
        bytes += full_bytes_of(parts_.params[id]);
      }
    }
    const bool is_running =
        num_begun_ < running_number_ || (!open_.empty() && open_.back().number == running_number_);
    return bytes - (is_running ? running_bytes_ : 0) <= options_.budgets.live_limit_bytes;
  }

  void depart(const Use& use) {
    const auto text = [this](const Use& of) {
      return detail::concat("the ", to_string(of.phase), " of unit '", units_[of.unit].name, "'");
    };
    const std::size_t position = trace_.position();
    parts_.logger.info("the step departs from its trace at use ", position, ": ",
                       position < trace_.uses().size() ? text(trace_.uses()[position])
                                                       : std::string("the end of the step"),
                       " was expected, ", text(use),
                       " came; it goes on without prefetch, and the next step records anew");
    is_wanted_ = persists_;
    for (const int id : units_[use.unit].ids) {
      is_wanted_[static_cast<std::size_t>(id)] = true;
    }
    release_unwanted();
  }

  void release_unwanted() {
    const Pending computed = gatherer_->computed();
    for (int id = 0; id < parts_.params.num_params(); ++id) {
      Param& param = parts_.params[id];
      if (is_wanted_[static_cast<std::size_t>(id)] || param.num_users() > 0) {
        continue;
      }
      if (param.state() == ParamState::kGathering) {
        gatherer_->drop(param);
      } else if (param.state() == ParamState::kAvailable) {
        gatherer_->release(param, computed);
      }
    }
  }

  void make_new_plan() {
    const std::vector<std::vector<int>> ids = units_.param_ids();
    std::vector<PlanParam> params;
    for (const std::int64_t bytes : units_.param_bytes()) {
      params.push_back({bytes, persists_[params.size()]});
    }
    plan_ = make_plan({trace_.uses(), ids, params, options_.budgets});
  }

  const CoordinatorParts parts_;
  const CoordinatorOptions options_;
  const bool is_alone_;
  UnitTable units_;
  device::Stream& compute_;

  AccessTrace trace_;
  std::vector<OpenUse> open_;  // in the order of their begins
  std::uint64_t num_begun_ = 0;
  std::uint64_t num_uses_ = 0;  // since take_stats()

  // Several ranks.
  std::vector<bool> is_wanted_;  // by parameter id: stays when it has no user
  std::vector<bool> persists_;   // by parameter id
  PrefetchPlan plan_;
  const PlannedUse* held_back_ = nullptr;  // of plan_; its calls from next_call_ on
  std::size_t next_call_ = 0;
  std::uint64_t running_number_ = 0;  // the use that held_back_ belongs to
  std::int64_t running_bytes_ = 0;
  std::unique_ptr<Gatherer> gatherer_;
  std::uint64_t overflows_taken_ = 0;

  // A group of one.
  std::vector<std::uint64_t> seen_versions_;  // by parameter id: updates that were waited for
  std::int64_t own_bytes_ = 0;
  std::int64_t own_bytes_peak_ = 0;
};

Coordinator::Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options)
    : impl_(std::make_unique<Impl>(parts, options)) {}
Coordinator::~Coordinator() = default;

UnitId Coordinator::add_unit(std::string name, std::vector<int> params) {
  return impl_->units().add(std::move(name), params);
}
void Coordinator::add_external(UnitId unit, int param) { impl_->units().add_param(unit, param); }
const std::string& Coordinator::unit_name(UnitId unit) const { return impl_->units()[unit].name; }
void Coordinator::begin_use(UnitId unit, Phase phase) { impl_->begin_use(unit, phase); }
void Coordinator::end_use(UnitId unit, Phase phase) { impl_->end_use(unit, phase); }
void Coordinator::begin_hold(const std::vector<int>& params, const std::string& what) {
  impl_->begin_hold(params, what);
}
void Coordinator::end_hold(const std::vector<int>& params, const std::string& what, bool changed) {
  impl_->end_hold(params, what, changed);
}
void Coordinator::end_step() { impl_->end_step(); }
void Coordinator::release_all() { impl_->abandon_step(); }
TraceMode Coordinator::trace_mode() const { return impl_->trace_mode(); }
CoordinatorStats Coordinator::take_stats() { return impl_->take_stats(); }
std::int64_t Coordinator::full_bytes() const { return impl_->full_bytes(); }
std::size_t Coordinator::arena_bytes() const { return impl_->arena_bytes(); }

}  // namespace tessera::coordinator
