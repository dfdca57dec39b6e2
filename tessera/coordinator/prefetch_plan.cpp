#include "tessera/coordinator/prefetch_plan.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::coordinator {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// One parameter at one use.
struct Place {
  int param = 0;
  std::size_t use = 0;
  std::size_t previous = kNone;  // the place of the same parameter before this one
  std::size_t next = kNone;
  bool stays = false;       // held from this use to the next place
  bool prefetched = false;  // for this use
};

class Planner {
 public:
  explicit Planner(const PlanInput& input)
      : input_(input),
        budgets_(input.budgets),
        num_uses_(input.uses.size()),
        others_(num_uses_ + 1),
        persistent_(num_uses_ + 1) {
    lay_out_places();
  }

  PrefetchPlan make() {
    plan_.uses.resize(num_uses_);
    decide_what_stays();
    if (budgets_.bucket_bytes > 0) {
      for (std::size_t use = 0; use < num_uses_; ++use) {
        prefetch_during(use);
      }
    }
    for (std::size_t use = 0; use < num_uses_; ++use) {
      write_down(use);
    }
    return std::move(plan_);
  }

 private:
  std::span<Place> places_of(std::size_t use) {
    return std::span(places_).subspan(first_place_[use], first_place_[use + 1] - first_place_[use]);
  }
  const PlanParam& param_of(const Place& place) const {
    return input_.params[static_cast<std::size_t>(place.param)];
  }

  void lay_out_places() {
    std::vector<std::size_t> latest(input_.params.size(), kNone);
    first_place_.reserve(num_uses_ + 1);
    bytes_before_.reserve(num_uses_ + 1);
    std::int64_t bytes = 0;
    for (std::size_t use = 0; use < num_uses_; ++use) {
      first_place_.push_back(places_.size());
      bytes_before_.push_back(bytes);
      const auto unit = static_cast<std::size_t>(input_.uses[use].unit);
      TESSERA_INVARIANT(unit < input_.unit_params.size(), "use ", use, " of the trace is of unit ",
                        input_.uses[use].unit, ", of ", input_.unit_params.size());
      for (const int param : input_.unit_params[unit]) {
        TESSERA_INVARIANT(static_cast<std::size_t>(param) < input_.params.size(), "unit ", unit,
                          " needs parameter ", param, ", of ", input_.params.size());
        std::size_t& before = latest[static_cast<std::size_t>(param)];
        if (before != kNone) {
          places_[before].next = places_.size();
        }
        places_.push_back({.param = param, .use = use, .previous = before});
        before = places_.size() - 1;
        bytes += param_of(places_.back()).full_bytes;
      }
    }
    first_place_.push_back(places_.size());
    bytes_before_.push_back(bytes);
  }

  // Writes at each end of a span of uses what it changes; add_up() makes sums of it.
  static void add_between(std::vector<std::int64_t>& changes, std::size_t begin, std::size_t end,
                          std::int64_t bytes) {
    changes[begin] += bytes;
    changes[end] -= bytes;
  }
  static void add_up(std::vector<std::int64_t>& changes) {
    for (std::size_t i = 1; i < changes.size(); ++i) {
      changes[i] += changes[i - 1];
    }
  }

  std::int64_t bytes_between(const Place& place, const Place& next) const {
    return bytes_before_[next.use] - bytes_before_[place.use + 1];
  }

  // Belady, without prefetches: parameters wait for their next use until they are pushed out by
  // those that are used sooner. Only who is still there at its next use really stays.
  void decide_what_stays() {
    for (const Place& place : places_) {
      if (param_of(place).persists) {
        const std::size_t end = place.next == kNone ? num_uses_ : places_[place.next].use;
        add_between(persistent_, place.use + 1, end, param_of(place).full_bytes);
      }
    }
    add_up(persistent_);

    std::set<std::pair<std::size_t, std::size_t>> waiting;  // next use, place
    std::int64_t waiting_bytes = 0;
    for (std::size_t use = 0; use < num_uses_; ++use) {
      for (const Place& place : places_of(use)) {
        if (place.previous != kNone && waiting.erase({use, place.previous}) == 1) {
          waiting_bytes -= param_of(place).full_bytes;
          places_[place.previous].stays = true;
        }
      }
      while (!waiting.empty() && waiting_bytes + persistent_[use] > budgets_.live_limit_bytes) {
        const auto farthest = std::prev(waiting.end());
        waiting_bytes -= param_of(places_[farthest->second]).full_bytes;
        waiting.erase(farthest);
      }
      for (std::size_t i = first_place_[use]; i < first_place_[use + 1]; ++i) {
        const Place& place = places_[i];
        if (place.next != kNone && !param_of(place).persists &&
            bytes_between(place, places_[place.next]) <= budgets_.reuse_distance_bytes) {
          waiting.emplace(places_[place.next].use, i);
          waiting_bytes += param_of(place).full_bytes;
        }
      }
    }

    for (const Place& place : places_) {
      if (place.stays) {
        add_between(others_, place.use + 1, places_[place.next].use, param_of(place).full_bytes);
      }
    }
    add_up(others_);
    for (std::size_t use = 0; use < num_uses_; ++use) {
      others_[use] += persistent_[use];
    }
  }

  bool is_held_from_before(const Place& place) const {
    return place.previous != kNone && (param_of(place).persists || places_[place.previous].stays);
  }
  bool is_provided_for(const Place& place) const {
    return place.prefetched || is_held_from_before(place);
  }
  // Not provided for, but still held during `now`, or by then: it can stay instead of being
  // gathered again.
  bool can_stay(const Place& place, std::size_t now) const {
    return place.previous != kNone && places_[place.previous].use >= now;
  }

  void prefetch_during(std::size_t now) {
    while (!inflight_.empty() && inflight_.front() <= now) {
      inflight_.pop_front();
    }
    std::int64_t call_bytes = -1;  // of the call that is put together; below zero: none
    for (reached_ = std::max(reached_, now + 1); reached_ < num_uses_; ++reached_) {
      std::int64_t bytes = 0;
      GatherList list;
      bool is_provided = true;
      for (const Place& place : places_of(reached_)) {
        if (!is_provided_for(place)) {
          is_provided = false;
          if (!can_stay(place, now)) {
            bytes += param_of(place).full_bytes;
            list.push_back(place.param);
          }
        }
      }
      if (is_provided) {
        continue;
      }
      const bool joins = call_bytes >= 0 && call_bytes < budgets_.merge_below_bytes &&
                         bytes <= budgets_.bucket_bytes - call_bytes;
      if (!joins && inflight_.size() >= static_cast<std::size_t>(budgets_.max_inflight)) {
        return;
      }
      if (!take_room(now, reached_)) {
        return;
      }
      if (list.empty()) {
        continue;
      }
      std::vector<GatherList>& calls = plan_.uses[now].prefetch;
      if (joins) {
        calls.back().insert(calls.back().end(), list.begin(), list.end());
        call_bytes += bytes;
      } else {
        calls.push_back(std::move(list));
        call_bytes = bytes;
        inflight_.push_back(reached_);
      }
    }
  }

  // Holds what is not provided for from `now` on until `use`, if that fits.
  bool take_room(std::size_t now, std::size_t use) {
    const auto add = [&](int sign) {
      for (const Place& place : places_of(use)) {
        if (!is_provided_for(place)) {
          const std::size_t begin = can_stay(place, now) ? places_[place.previous].use + 1 : now;
          for (std::size_t i = begin; i < use; ++i) {
            others_[i] += sign * param_of(place).full_bytes;
          }
        }
      }
    };
    add(+1);
    for (std::size_t i = now; i < use; ++i) {
      if (others_[i] > budgets_.live_limit_bytes) {
        add(-1);
        return false;
      }
    }
    for (Place& place : places_of(use)) {
      if (!is_provided_for(place)) {
        if (can_stay(place, now)) {
          places_[place.previous].stays = true;
        } else {
          place.prefetched = true;
        }
      }
    }
    return true;
  }

  void write_down(std::size_t use) {
    PlannedUse& planned = plan_.uses[use];
    for (const Place& place : places_of(use)) {
      if (!is_provided_for(place)) {
        planned.demand.push_back(place.param);
      }
      if (!place.stays && !param_of(place).persists) {
        planned.release.push_back(place.param);
      }
    }
    const std::int64_t use_bytes = bytes_before_[use + 1] - bytes_before_[use];
    plan_.peak_bytes = std::max(plan_.peak_bytes, use_bytes + others_[use]);
  }

  const PlanInput& input_;
  const PlanBudgets& budgets_;
  const std::size_t num_uses_;
  std::vector<Place> places_;             // use by use
  std::vector<std::size_t> first_place_;  // by use
  std::vector<std::int64_t> bytes_before_;
  // By use: full bytes held while it runs, without its own; all of them, and the persistent ones.
  std::vector<std::int64_t> others_;
  std::vector<std::int64_t> persistent_;
  std::size_t reached_ = 0;           // uses before this one are provided for
  std::deque<std::size_t> inflight_;  // first use of each prefetch, in order
  PrefetchPlan plan_;
};

}  // namespace

PrefetchPlan make_plan(const PlanInput& input) { return Planner(input).make(); }

std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t live_limit_bytes) {
  std::vector<bool> persists(full_bytes.size());
  std::int64_t room_bytes = std::min(model_bytes, live_limit_bytes);
  for (std::size_t i = 0; i < full_bytes.size(); ++i) {
    if (full_bytes[i] <= param_bytes && full_bytes[i] <= room_bytes) {
      persists[i] = true;
      room_bytes -= full_bytes[i];
    }
  }
  return persists;
}

}  // namespace tessera::coordinator
