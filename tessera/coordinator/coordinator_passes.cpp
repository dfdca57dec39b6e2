// Which plan is carried out, where it begins, and what happens when a pass departs from it.

#include <algorithm>
#include <utility>

#include "tessera/coordinator/coordinator_impl.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using shard::ParamState;

void Coordinator::Impl::follow_trace(const Use& use) {
  if (num_static_open_ == 0 && book_.is_root(use)) {
    end_pass();
  }
  switch (book_.advance(use)) {
    case TraceBook::Move::kRecorded:
      break;
    case TraceBook::Move::kFollowed:
      if (book_.position() == 1 && ahead_of_ != book_.following()) {
        take_up_plan();
      }
      break;
    case TraceBook::Move::kSwitched:
      take_up_plan();
      break;
    case TraceBook::Move::kDeparted:
      depart(use);
      break;
  }
}

void Coordinator::Impl::end_pass() {
  book_.end_pass(/*by_step=*/false);
  const TraceId next = book_.following();
  if (next == kNoTrace || ahead_of_ != next) {
    ahead_of_ = kNoTrace;
    is_wanted_ = persists_;
    release_unwanted();
  }
  plan_ = next == kNoTrace ? nullptr : &plan_of(next);
}

void Coordinator::Impl::depart(const Use& use) {
  const std::optional<Use>& expected = book_.expected_use();
  parts_.logger.info(
      "the pass departs from every trace that is known at its use ", book_.position() - 1, ": ",
      expected ? text_of(*expected) : std::string("the end of the pass"), " was expected, ",
      text_of(use), " came; it goes on without prefetch, and will be known the next time");
  ahead_of_ = kNoTrace;
  plan_ = nullptr;
  if (loader_ != nullptr) {
    loader_->forget_read_ahead();
  }
  is_wanted_ = persists_;
  for (const int id : units_[use.unit].planned) {
    is_wanted_[static_cast<std::size_t>(id)] = true;
  }
  release_unwanted();
}

// The pass follows another trace than before, or one whose first gathers were not started: holds
// what that plan would hold by now, and lets the rest go.
void Coordinator::Impl::take_up_plan() {
  const Trace& trace = book_.trace(book_.following());
  plan_ = &plan_of(book_.following());
  ahead_of_ = book_.following();
  const std::size_t position = book_.position() - 1;
  const Use& use = trace.uses[position];
  if (const std::optional<Use>& expected = book_.expected_use()) {
    parts_.logger.debug("at use ", position, " of a pass ", text_of(use), " came in place of ",
                        text_of(*expected), "; another known trace is followed");
  }
  PlanState state = state_after(plan_input(trace), *plan_, position);
  is_wanted_ = std::move(state.held);
  for (std::size_t id = 0; id < is_wanted_.size(); ++id) {
    is_wanted_[id] = is_wanted_[id] || persists_[id];
  }
  for (const int id : units_[use.unit].planned) {
    is_wanted_[static_cast<std::size_t>(id)] = true;
  }
  release_unwanted();
  // The use that begins gets what it needs at once; what is started for the ones after it.
  resumed_.clear();
  const std::vector<int>& needed = units_[use.unit].planned;
  for (GatherList& list : state.outstanding) {
    std::erase_if(list,
                  [&](int id) { return std::binary_search(needed.begin(), needed.end(), id); });
    if (!list.empty() &&
        resumed_.size() < static_cast<std::size_t>(options_.budgets.max_inflight)) {
      resumed_.push_back(std::move(list));
    }
  }
}

PlanInput Coordinator::Impl::plan_input(const Trace& trace) const {
  PlanInput input;
  input.uses = trace.uses;
  input.unit_params = unit_params_;
  input.params = plan_params_;
  input.budgets = plan_budgets_;
  input.open_until = trace.open_until;
  input.arena_bytes = static_cast<std::int64_t>(gatherer_->arena_bytes());
  return input;
}

const PrefetchPlan& Coordinator::Impl::plan_of(TraceId id) {
  const auto known = plans_.find(id);
  if (known != plans_.end()) {
    return known->second;
  }
  std::erase_if(plans_, [&](const auto& entry) { return !book_.knows(entry.first); });
  const PlanInput input = plan_input(book_.trace(id));
  return plans_.emplace(id, tier_ ? make_placed_plan(input) : make_plan(input)).first->second;
}

void Coordinator::Impl::want_ahead(const PrefetchPlan& plan) {
  is_wanted_ = persists_;
  for (const GatherList& list : plan.ahead.prefetch) {
    for (const int id : list) {
      is_wanted_[static_cast<std::size_t>(id)] = true;
    }
  }
}

void Coordinator::Impl::start_calls_ahead(const PrefetchPlan& plan) {
  queue_prefetches(&plan.ahead);
  start_prefetches(RoomCheck::kSkipped);
}

void Coordinator::Impl::start_ahead() {
  const TraceId next = book_.following();
  if (!gatherer_ || next == kNoTrace || book_.position() > 0 || resident_) {
    return;
  }
  const PrefetchPlan& plan = plan_of(next);
  plan_ = &plan;
  ahead_of_ = next;
  running_ = book_.trace(next).uses.front();
  want_ahead(plan);
  start_calls_ahead(plan);
  read_ahead();
}

// The last use of a pass has ended, and no step is going to follow. Ranks that meet do not do this:
// a rank that only follows learns of the end with the next use.
void Coordinator::Impl::start_next_pass_if_foreseen() {
  if (num_static_open_ > 0 || meets_) {
    return;
  }
  const std::optional<TraceBook::Next> next = book_.expected_next();
  if (!next || next->is_step || !book_.knows(next->trace)) {
    return;
  }
  const PrefetchPlan& plan = plan_of(next->trace);
  ahead_of_ = next->trace;
  want_ahead(plan);
  release_unwanted();
  start_calls_ahead(plan);
}

// A rank that used other units than the rest is found at its first gather that differs. Where all
// is held there may be none: so ranks compare what they used before anything is made of it. Nothing
// moves but a tag; where uses differ, their names follow. A rank that gave up a pass on its own,
// and went on with the next, may use the same units from there on as the others do: so that is
// compared, too.
device::Pending Coordinator::Impl::start_comparing_uses() {
  const Trace trace = book_.seen();
  std::vector<comm::Gather> named(trace.uses.size());
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    const std::int32_t use[2] = {trace.uses[i].unit,
                                 static_cast<std::int32_t>(trace.uses[i].phase)};
    hash = comm::hash_bytes(use, sizeof(use), hash);
    named[i].name = unit_texts_[static_cast<std::size_t>(trace.uses[i].unit)];
  }
  comm::CallOptions options;
  const std::string label = "the uses of this step" + given_up_;
  options.label.unit = label;
  options.content_hash = hash;
  return parts_.group.start_all_gather(named, options);
}

void Coordinator::Impl::queue_prefetches(const PlannedUse* planned) {
  queue_.clear();
  next_call_ = 0;
  if (planned == nullptr) {
    resumed_.clear();
    return;
  }
  for (const int id : planned->release) {
    is_wanted_[static_cast<std::size_t>(id)] = false;
  }
  for (const GatherList& list : resumed_) {
    queue_.push_back({&list, nullptr});
  }
  for (std::size_t i = 0; i < planned->prefetch.size(); ++i) {
    const GatherList& list = planned->prefetch[i];
    queue_.push_back({&list, &planned->prefetch_offsets[i]});
    for (const int id : list) {
      is_wanted_[static_cast<std::size_t>(id)] = true;
    }
  }
}

// See [Note: overlapping uses].
void Coordinator::Impl::start_prefetches(RoomCheck check) {
  for (; next_call_ < queue_.size(); ++next_call_) {
    const GatherList& list = *queue_[next_call_].params;
    if (check == RoomCheck::kHeeded && !has_room_for(list)) {
      return;
    }
    const OffsetList* offsets = queue_[next_call_].offsets;
    const UnitId owner = units_.owner_id(list.front());
    gatherer_->start(list,
                     offsets != nullptr ? std::span(*offsets) : std::span<const std::int64_t>(),
                     units_[owner].name, {owner, running_.phase, Reason::kPrefetch});
  }
  queue_.clear();
  next_call_ = 0;
  resumed_.clear();
}

// What the uses behind those that are gathered ahead need next, in their order.
void Coordinator::Impl::read_ahead() {
  if (loader_ == nullptr || plan_ == nullptr || book_.mode() != TraceMode::kComplete) {
    return;
  }
  ahead_ids_.clear();
  const std::vector<Use>& uses = book_.trace(book_.following()).uses;
  std::size_t bytes = 0;
  for (std::size_t i = book_.position(); i < uses.size() && bytes < loader_->window_bytes();
       ++i) {
    for (const int id : unit_params_[static_cast<std::size_t>(uses[i].unit)]) {
      const shard::Param& param = parts_.params[id];
      if (param.is_on_nvme() && param.state() == ParamState::kReleased &&
          std::find(ahead_ids_.begin(), ahead_ids_.end(), id) == ahead_ids_.end()) {
        ahead_ids_.push_back(id);
        bytes += param.layout().shard_bytes();
      }
    }
  }
  loader_->read_ahead(ahead_ids_);
}

bool Coordinator::Impl::has_room_for(const GatherList& list) const {
  std::int64_t bytes = gatherer_->full_bytes();
  for (const int id : list) {
    if (parts_.params[id].state() == ParamState::kReleased && !parts_.params[id].shard_is_full()) {
      bytes += full_bytes_of(parts_.params[id]);
    }
  }
  return bytes <= plan_budgets_.live_limit_bytes;
}

}  // namespace tessera::coordinator
