// Parameters outside of uses: held for somebody, or resident for many inferences.

#include <algorithm>
#include <iterator>
#include <vector>

#include "tessera/coordinator/coordinator_impl.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using shard::Param;

void Coordinator::Impl::begin_hold(const std::vector<int>& params, const std::string& what) {
  seal();
  std::vector<Param*> held;
  for (const int id : params) {
    held.push_back(&parts_.params[id]);
  }
  std::vector<Param*> direct;
  std::copy_if(held.begin(), held.end(), std::back_inserter(direct),
               [](const Param* param) { return param->shard_is_full(); });
  attach(direct);
  if (gatherer_) {
    meet(MeetingPoint::kHold, what);
    start_prefetches(RoomCheck::kSkipped);
    make_room_for(params);
    const Cause cause;
    gatherer_->start(params, {}, what, cause);
    gatherer_->finish(held, parts_.spans.intern(what), cause);
  }
  for (Param* param : held) {
    param->add_user();
  }
}

// What was gathered ahead or kept goes if the limit does not hold both.
void Coordinator::Impl::make_room_for(const std::vector<int>& params) {
  if (resident_ || has_room_for(params)) {
    return;
  }
  is_wanted_.assign(is_wanted_.size(), false);
  for (const int id : params) {
    is_wanted_[static_cast<std::size_t>(id)] = true;
  }
  release_unwanted();
  is_wanted_ = persists_;
  ahead_of_ = kNoTrace;  // the next pass starts its first gathers itself
}

void Coordinator::Impl::end_hold(const std::vector<int>& params, const std::string& what,
                                 bool changed) {
  std::vector<Param*> held;
  for (const int id : params) {
    held.push_back(&parts_.params[id]);
  }
  remove_users(held, what, changed);
}

bool Coordinator::Impl::begin_resident() {
  seal();
  if (!open_.empty() || resident_) {
    throw_state(resident_ ? std::string("parameters are made resident twice")
                          : detail::concat("parameters are made resident inside ",
                                           text_of(open_.back().use)),
                units_[open_.empty() ? 0 : open_.back().use.unit]);
  }
  if (!gatherer_) {
    resident_ = true;
    return true;
  }
  std::int64_t all = 0;
  for (const PlanParam& param : plan_params_) {
    all += param.full_bytes;
  }
  if (all > options_.budgets.live_limit_bytes) {
    return false;
  }
  meet(MeetingPoint::kHold, "resident parameters");
  start_prefetches(RoomCheck::kSkipped);
  book_.forget_pass();
  plan_ = nullptr;
  ahead_of_ = kNoTrace;
  is_wanted_.assign(is_wanted_.size(), true);
  const Cause cause;
  for (std::size_t i = 0; i < units_.num_units(); ++i) {
    const UnitInfo& unit = units_[static_cast<UnitId>(i)];
    gatherer_->start(unit.ids, {}, unit.name, cause);
  }
  for (std::size_t i = 0; i < units_.num_units(); ++i) {
    const UnitInfo& unit = units_[static_cast<UnitId>(i)];
    gatherer_->finish(unit.params, unit.label, cause);
  }
  resident_ = true;
  return true;
}

void Coordinator::Impl::end_resident() {
  if (!resident_ || !open_.empty()) {
    throw StateError(resident_ ? detail::concat("parameters cease to be resident inside ",
                                                text_of(open_.back().use))
                               : std::string("parameters are not resident"),
                     {}, {});
  }
  resident_ = false;
  if (gatherer_) {
    is_wanted_ = persists_;
    release_unwanted();
  }
}

}  // namespace tessera::coordinator
