#include "tessera/coordinator/prefetcher.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"

namespace tessera::coordinator {

using shard::ParamState;

Prefetcher::Prefetcher(const Parts& parts, const PrefetcherOptions& options)
    : parts_(parts),
      options_(options),
      unit_params_(parts.units.planned_ids()),
      book_(options.max_traces) {
  // What nobody plans for must find room beside what is planned.
  options_.budgets.live_limit_bytes = std::max<std::int64_t>(
      0, options_.budgets.live_limit_bytes - parts_.units.largest_bytes(/*dynamic=*/true));
  choose_what_persists();
  const std::vector<std::int64_t> bytes = parts_.units.param_bytes();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    // Where the arena is all there is, what rounding takes of it counts.
    const auto rounded =
        static_cast<std::int64_t>(device::round_to_arena(static_cast<std::size_t>(bytes[i])));
    plan_params_.push_back({options_.has_fixed_arena ? rounded : bytes[i], persists_[i]});
  }
  log_what_cannot_be_prefetched();
}

void Prefetcher::choose_what_persists() {
  const UnitTable& units = parts_.units;
  persists_ = choose_persistent(
      units.param_bytes(), options_.persist_param_bytes, options_.persist_model_bytes,
      room_to_persist(options_.budgets.live_limit_bytes, units.largest_bytes(/*dynamic=*/false)));
  const bool is_alone = parts_.params.num_ranks() == 1;
  for (std::size_t i = 0; i < units.num_units() && !is_alone; ++i) {
    const UnitInfo& unit = units[static_cast<UnitId>(i)];
    for (const int id : unit.traits.dynamic ? unit.ids : unit.mixed) {
      persists_[static_cast<std::size_t>(id)] = false;
    }
  }
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    if (parts_.params[id].shard_is_full()) {
      persists_[static_cast<std::size_t>(id)] = false;
    }
  }
}

// No error, and no wrong number; but somebody who reads the misses should know their reason.
void Prefetcher::log_what_cannot_be_prefetched() const {
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
                         parts_.units[static_cast<UnitId>(i)].name, "' needs ", num_calls,
                         " gathers of at most prefetch.bucket_bytes=", budgets.bucket_bytes,
                         ", and prefetch.max_inflight=", budgets.max_inflight,
                         ": what is left of it is gathered on demand; raise either to prefetch all "
                         "of it");
      return;
    }
  }
}

std::size_t Prefetcher::follow_trace(const Use& use, bool is_outermost) {
  start_held_back();
  if (is_outermost && book_.is_root(use)) {
    end_pass();
  }
  switch (book_.advance(use)) {
    case TraceBook::Move::kRecorded:
      break;
    case TraceBook::Move::kFollowed:
      if (book_.position() == 1 && walked_ != book_.following()) {
        take_up_plan();
      }
      break;
    case TraceBook::Move::kSwitched:
      take_up_plan();
      break;
    case TraceBook::Move::kMissed:
      handle_miss(use);
      break;
  }
  return book_.position() - 1;
}

void Prefetcher::end_pass() {
  book_.end_pass(/*by_step=*/false);
  const TraceId next = book_.following();
  if (next == kNoTrace || walked_ != next) {
    end_walk();
  } else if (walk_->position() > 0) {  // the same once more
    start_walk(next);
  } else {
    return;  // its first gathers are on their way
  }
  parts_.gatherer.release_idle(what_stays());
}

void Prefetcher::handle_miss(const Use& use) {
  const std::optional<Use>& expected = book_.expected_use();
  parts_.logger.info(
      "execution order changed at use ", book_.position() - 1, ": expected ",
      expected ? parts_.units.text_of(*expected) : std::string("the end of the pass"), ", got ",
      parts_.units.text_of(use),
      "; prefetch is off for this pass, and the new order is known from the next one on");
  end_walk();
  if (parts_.loader != nullptr) {
    parts_.loader->forget_read_ahead();
  }
  parts_.gatherer.release_idle(what_stays(parts_.units[use.unit].planned));
}

// The pass follows another trace than before, or one whose first gathers were not started: holds
// what that plan would hold by now, and frees the rest.
void Prefetcher::take_up_plan() {
  const std::size_t position = book_.position() - 1;
  start_walk(book_.following());
  walk_->advance_to(position);
  const Use& use = book_.trace(walked_).uses[position];
  if (const std::optional<Use>& expected = book_.expected_use()) {
    parts_.logger.debug("execution order changed at use ", position, ": expected ",
                        parts_.units.text_of(*expected), ", got ", parts_.units.text_of(use),
                        "; another known order is followed");
  }
  // The use that begins gets what it needs at once; what is started for the ones after it.
  const std::vector<int>& needed = parts_.units[use.unit].planned;
  parts_.gatherer.release_idle(what_stays(needed));
  resumed_.clear();
  for (GatherList& list : walk_->outstanding()) {
    std::erase_if(list,
                  [&](int id) { return std::binary_search(needed.begin(), needed.end(), id); });
    if (!list.empty() &&
        resumed_.size() < static_cast<std::size_t>(options_.budgets.max_inflight)) {
      resumed_.push_back(std::move(list));
    }
  }
}

PlanInput Prefetcher::plan_input(TraceId id) const {
  const Trace& trace = book_.trace(id);
  PlanInput input;
  input.uses = trace.uses;
  input.unit_params = unit_params_;
  input.params = plan_params_;
  input.budgets = options_.budgets;
  input.open_until = trace.open_until;
  input.arena_bytes = static_cast<std::int64_t>(parts_.gatherer.arena_bytes());
  return input;
}

const PrefetchPlan& Prefetcher::plan_of(TraceId id) {
  const auto known = plans_.find(id);
  if (known != plans_.end()) {
    return known->second;
  }
  std::erase_if(plans_, [&](const auto& entry) { return !book_.knows(entry.first); });
  const PlanInput input = plan_input(id);
  return plans_.emplace(id, options_.has_fixed_arena ? make_placed_plan(input) : make_plan(input))
      .first->second;
}

void Prefetcher::start_walk(TraceId id) {
  const PrefetchPlan& plan = plan_of(id);
  walk_.emplace(plan_input(id), plan);
  walked_ = id;
}

void Prefetcher::end_walk() {
  walk_.reset();
  walked_ = kNoTrace;
}

const PlannedUse* Prefetcher::planned() const {
  return book_.mode() == TraceMode::kComplete ? &plans_.at(walked_).uses[book_.position() - 1]
                                              : nullptr;
}

void Prefetcher::use_begun(const Use& use) {
  phase_ = use.phase;
  if (const PlannedUse* const planned = this->planned()) {
    walk_->advance_to(book_.position());
    queue(*planned);
    start_queue(RoomCheck::kHeeded);
    read_ahead();
  }
}

void Prefetcher::use_ended(bool is_outermost) {
  start_queue(RoomCheck::kHeeded);
  if (is_outermost && options_.starts_next_pass) {
    start_next_pass_if_foreseen();
  }
}

// The last use of a pass has ended, and no step is going to follow.
void Prefetcher::start_next_pass_if_foreseen() {
  const std::optional<TraceBook::Next> next = book_.expected_next();
  if (!next || next->is_step || !book_.knows(next->trace)) {
    return;
  }
  start_walk(next->trace);
  parts_.gatherer.release_idle(what_stays());
  queue(plan_of(next->trace).ahead);
  start_held_back();
}

std::vector<bool> Prefetcher::what_stays(std::span<const int> besides) const {
  std::vector<bool> all = persists_;
  for (std::size_t id = 0; id < all.size() && walk_; ++id) {
    all[id] = all[id] || walk_->wanted()[id];
  }
  for (const int id : besides) {
    all[static_cast<std::size_t>(id)] = true;
  }
  return all;
}

void Prefetcher::queue(const PlannedUse& planned) {
  queue_.clear();
  next_call_ = 0;
  for (const GatherList& list : resumed_) {
    queue_.push_back({&list, nullptr});
  }
  for (std::size_t i = 0; i < planned.prefetch.size(); ++i) {
    queue_.push_back({&planned.prefetch[i], &planned.prefetch_offsets[i]});
  }
}

void Prefetcher::start_queue(RoomCheck check) {
  for (; next_call_ < queue_.size(); ++next_call_) {
    const GatherList& list = *queue_[next_call_].params;
    if (check == RoomCheck::kHeeded && !has_room_for(list)) {
      return;
    }
    const OffsetList* offsets = queue_[next_call_].offsets;
    const UnitId owner = parts_.units.owner_id(list.front());
    parts_.gatherer.start(
        list, offsets != nullptr ? std::span(*offsets) : std::span<const std::int64_t>(),
        parts_.units[owner].name, {owner, phase_, Reason::kPrefetch});
  }
  queue_.clear();
  next_call_ = 0;
  resumed_.clear();
}

bool Prefetcher::has_room_for(std::span<const int> params) const {
  std::int64_t bytes = parts_.gatherer.full_bytes();
  for (const int id : params) {
    const shard::Param& param = parts_.params[id];
    if (param.state() == ParamState::kReleased && !param.shard_is_full()) {
      bytes += full_bytes_of(param);
    }
  }
  return bytes <= options_.budgets.live_limit_bytes;
}

std::int64_t Prefetcher::planned_bytes() const {
  std::int64_t bytes = 0;
  for (const PlanParam& param : plan_params_) {
    bytes += param.full_bytes;
  }
  return bytes;
}

void Prefetcher::make_room_for(std::span<const int> params) {
  if (has_room_for(params)) {
    return;
  }
  std::vector<bool> stays(persists_.size());
  for (const int id : params) {
    stays[static_cast<std::size_t>(id)] = true;
  }
  parts_.gatherer.release_idle(stays);
  if (walk_ && walk_->position() == 0) {
    end_walk();  // the next pass starts its first gathers itself
  }
}

void Prefetcher::end_step() {
  end_walk();
  book_.end_pass(/*by_step=*/true);
}

void Prefetcher::start_ahead() {
  const TraceId next = book_.following();
  if (next == kNoTrace || book_.position() > 0) {
    return;
  }
  start_walk(next);
  phase_ = book_.trace(next).uses.front().phase;
  queue(plan_of(next).ahead);
  start_held_back();
  read_ahead();
}

void Prefetcher::forget_pass() {
  queue_.clear();
  next_call_ = 0;
  resumed_.clear();
  end_walk();
  book_.forget_pass();
}

// What the uses behind those that are gathered ahead need next, in their order.
void Prefetcher::read_ahead() {
  if (parts_.loader == nullptr || parts_.loader->window_bytes() == 0) {
    return;
  }
  ahead_ids_.clear();
  const std::vector<Use>& uses = book_.trace(book_.following()).uses;
  std::size_t bytes = 0;
  for (std::size_t i = book_.position(); i < uses.size() && bytes < parts_.loader->window_bytes();
       ++i) {
    for (const int id : unit_params_[static_cast<std::size_t>(uses[i].unit)]) {
      const shard::Param& param = parts_.params[id];
      const bool is_read = parts_.encoded == nullptr || !parts_.encoded->has(param);
      if (param.is_on_nvme() && is_read && param.state() == ParamState::kReleased &&
          std::find(ahead_ids_.begin(), ahead_ids_.end(), id) == ahead_ids_.end()) {
        ahead_ids_.push_back(id);
        bytes += param.layout().shard_bytes();
      }
    }
  }
  parts_.loader->read_ahead(ahead_ids_);
}

}  // namespace tessera::coordinator
