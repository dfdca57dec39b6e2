#include "tessera/coordinator/trace_book.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::coordinator {
namespace {

// Passes of one step are told apart by their number up to here: an endless evaluation must not
// fill the memory.
constexpr int kMaxNumber = 1024;
// The same for training without a step: the pass is cut.
constexpr std::size_t kMaxUses = std::size_t{1} << 20;

}  // namespace

const TraceBook::Kept* TraceBook::find(TraceId id) const {
  const auto found =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) { return kept.id == id; });
  return found == kept_.end() ? nullptr : &*found;
}

const Trace& TraceBook::trace(TraceId id) const {
  const Kept* kept = find(id);
  TESSERA_INVARIANT(kept != nullptr, "trace ", id, " is not known");
  return kept->trace;
}

bool TraceBook::is_root(const Use& use) const {
  if (position_ == 0 || use.phase == Phase::kBackward) {
    return false;
  }
  if (position_ >= kMaxUses) {
    return true;
  }
  const bool is_inference = use.phase == Phase::kInference;
  if (is_inference != (first_.phase == Phase::kInference)) {
    return true;
  }
  return is_inference && use == first_ && last_ != use;
}

TraceBook::Move TraceBook::advance(const Use& use) {
  Move move = Move::kRecorded;
  if (mode_ == TraceMode::kComplete) {
    const std::vector<Use>& uses = followed_->trace.uses;
    const bool is_over = position_ == uses.size();
    if (!is_over && uses[position_] == use) {
      move = Move::kFollowed;
    } else {
      expected_use_ = is_over ? std::nullopt : std::optional<Use>(uses[position_]);
      if (const Kept* other = most_recent_with(uses, position_, use)) {
        follow(other);
        move = Move::kSwitched;
      } else {
        recorded_ = seen();
        follow(nullptr);
        mode_ = TraceMode::kInvalid;
        move = Move::kMissed;
      }
    }
  } else if (position_ == 0) {
    if (const Kept* known = most_recent_with({}, 0, use)) {
      follow(known);
      move = Move::kSwitched;
    }
  }
  if (mode_ != TraceMode::kComplete) {
    recorded_.uses.push_back(use);
    recorded_.open_until.push_back(static_cast<std::uint32_t>(recorded_.uses.size()));
  }
  if (position_ == 0) {
    first_ = use;
  }
  last_ = use;
  ++position_;
  return move;
}

void TraceBook::follow(const Kept* kept) {
  mode_ = kept == nullptr ? TraceMode::kRecord : TraceMode::kComplete;
  following_ = kept == nullptr ? kNoTrace : kept->id;
  followed_ = kept;
}

void TraceBook::note_end(std::size_t index) {
  if (mode_ != TraceMode::kComplete && index < recorded_.open_until.size()) {
    recorded_.open_until[index] = static_cast<std::uint32_t>(position_);
  }
}

std::optional<TraceBook::Next> TraceBook::expected_next() const {
  if (mode_ != TraceMode::kComplete || position_ != followed_->trace.uses.size()) {
    return std::nullopt;
  }
  const auto found = next_.find({following_, number_in_step_, false});
  return found == next_.end() ? std::nullopt : std::optional<Next>(found->second);
}

TraceId TraceBook::end_pass(bool by_step) {
  TraceId id = kNoTrace;
  if (position_ > 0) {
    const bool is_whole =
        mode_ == TraceMode::kComplete && position_ == followed_->trace.uses.size();
    id = is_whole ? following_ : keep(seen());
    for (Kept& kept : kept_) {
      if (kept.id == id) {
        kept.last_seen = ++num_seen_;
      }
    }
    if (before_) {
      next_[*before_] = {false, id};
    }
    before_ = Context{id, number_in_step_, false};
    if (number_in_step_ == 0) {
      first_in_step_ = id;
    }
    number_in_step_ = std::min(number_in_step_ + 1, kMaxNumber);
  }
  if (by_step) {
    if (before_ && !std::get<2>(*before_)) {
      next_[*before_] = {true, kNoTrace};
      std::get<2>(*before_) = true;
    }
    number_in_step_ = 0;
  }
  expect_next_pass();
  return id;
}

void TraceBook::expect_next_pass() {
  recorded_ = {};
  position_ = 0;
  expected_use_.reset();
  TraceId expected = kNoTrace;
  if (before_) {
    const auto next = next_.find(*before_);
    if (next != next_.end()) {
      expected = next->second.trace;
    } else if (std::get<2>(*before_)) {
      expected = first_in_step_;  // most steps are like the one before
    }
  }
  follow(find(expected));
}

void TraceBook::forget_pass() {
  before_.reset();
  number_in_step_ = 0;
  expect_next_pass();
}

Trace TraceBook::seen() const {
  if (mode_ != TraceMode::kComplete) {
    return recorded_;
  }
  Trace trace = followed_->trace;
  trace.uses.resize(position_);
  trace.open_until.resize(position_);
  for (std::uint32_t& end : trace.open_until) {
    end = std::min(end, static_cast<std::uint32_t>(position_));
  }
  return trace;
}

const TraceBook::Kept* TraceBook::most_recent_with(const std::vector<Use>& beginning,
                                                   std::size_t length, const Use& next) const {
  const Kept* found = nullptr;
  for (const Kept& kept : kept_) {
    const std::vector<Use>& uses = kept.trace.uses;
    if (uses.size() > length && uses[length] == next &&
        (found == nullptr || kept.last_seen > found->last_seen) &&
        std::equal(uses.begin(), uses.begin() + static_cast<std::ptrdiff_t>(length),
                   beginning.begin())) {
      found = &kept;
    }
  }
  return found;
}

TraceId TraceBook::keep(Trace trace) {
  const auto known = std::find_if(kept_.begin(), kept_.end(),
                                  [&](const Kept& kept) { return kept.trace.uses == trace.uses; });
  if (known != kept_.end()) {
    return known->id;
  }
  if (kept_.size() >= max_traces_) {
    evict_one();
  }
  kept_.push_back({next_id_, std::move(trace), ++num_seen_});
  return next_id_++;
}

void TraceBook::evict_one() {
  const auto oldest = std::min_element(
      kept_.begin(), kept_.end(),
      [](const Kept& left, const Kept& right) { return left.last_seen < right.last_seen; });
  const TraceId id = oldest->id;
  std::erase_if(next_, [&](const auto& entry) {
    return std::get<0>(entry.first) == id || entry.second.trace == id;
  });
  if (before_ && std::get<0>(*before_) == id) {
    before_.reset();
  }
  kept_.erase(oldest);
}

}  // namespace tessera::coordinator
