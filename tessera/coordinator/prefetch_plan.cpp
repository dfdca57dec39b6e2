#include "tessera/coordinator/prefetch_plan.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "tessera/coordinator/arena_plan.h"
#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"

namespace tessera::coordinator {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// One parameter at one use. Uses are counted from 1 here: 0 is the time before the first.
struct Access {
  int param = 0;
  std::size_t use = 0;
  std::size_t previous = kNone;  // of the same parameter, before this one
  std::size_t next = kNone;
  std::size_t busy_until = 0;  // in use, by this use or one around it, until this one begins
  bool stays = false;          // held from this use to the next access
  bool prefetched = false;     // for this use
};

class Planner {
 public:
  explicit Planner(const PlanInput& input)
      : input_(input),
        budgets_(input.budgets),
        num_uses_(input.uses.size() + 1),
        others_(num_uses_ + 1),
        persistent_(num_uses_ + 1),
        busy_(num_uses_ + 1) {
    TESSERA_INVARIANT(input.open_until.empty() || input.open_until.size() == input.uses.size(),
                      input.open_until.size(), " ends for ", input.uses.size(), " uses");
    lay_out_accesses();
  }

  PrefetchPlan make() {
    plan_.uses.resize(num_uses_ - 1);
    decide_what_stays();
    if (budgets_.bucket_bytes > 0) {
      for (std::size_t use = 0; use < num_uses_; ++use) {
        prefetch_during(use);
      }
    }
    keep_more_in_the_room_that_is_left();
    write_down_prefetches();
    for (std::size_t use = 0; use < num_uses_; ++use) {
      write_down(use);
    }
    if (input_.arena_bytes > 0) {
      assign_arena_offsets();
    }
    return std::move(plan_);
  }

 private:
  struct Gather {
    Access* access = nullptr;
    std::size_t during = 0;    // the use
    std::size_t call = kNone;  // number of the prefetch; kNone: on demand
    std::size_t index = 0;     // in the list that it is written to
  };

  std::span<Access> accesses_of(std::size_t use) {
    return std::span(accesses_).subspan(first_access_[use],
                                        first_access_[use + 1] - first_access_[use]);
  }
  const PlanParam& param_of(const Access& access) const {
    return input_.params[static_cast<std::size_t>(access.param)];
  }
  PlannedUse& planned(std::size_t use) { return use == 0 ? plan_.ahead : plan_.uses[use - 1]; }

  void lay_out_accesses() {
    std::vector<std::size_t> latest(input_.params.size(), kNone);
    first_access_ = {0, 0};
    bytes_before_ = {0, 0};
    std::int64_t bytes = 0;
    for (std::size_t use = 1; use < num_uses_; ++use) {
      const auto unit = static_cast<std::size_t>(input_.uses[use - 1].unit);
      TESSERA_INVARIANT(unit < input_.unit_params.size(), "use ", use - 1,
                        " of the trace is of unit ", input_.uses[use - 1].unit, ", of ",
                        input_.unit_params.size());
      const std::size_t end =
          input_.open_until.empty() ? use + 1 : std::size_t{input_.open_until[use - 1]} + 1;
      for (const int param : input_.unit_params[unit]) {
        TESSERA_INVARIANT(static_cast<std::size_t>(param) < input_.params.size(), "unit ", unit,
                          " needs parameter ", param, ", of ", input_.params.size());
        Access access{.param = param, .use = use, .busy_until = std::max(end, use + 1)};
        std::size_t& before = latest[static_cast<std::size_t>(param)];
        if (before != kNone) {
          accesses_[before].next = accesses_.size();
          access.previous = before;
          access.busy_until = std::max(access.busy_until, accesses_[before].busy_until);
        }
        before = accesses_.size();
        accesses_.push_back(access);
        bytes += param_of(access).full_bytes;
      }
      first_access_.push_back(accesses_.size());
      bytes_before_.push_back(bytes);
    }
  }

  // Writes at each end of a span of uses what it changes; add_up() makes sums of it.
  static void add_between(std::vector<std::int64_t>& changes, std::size_t begin, std::size_t end,
                          std::int64_t bytes) {
    if (begin < end) {
      changes[begin] += bytes;
      changes[end] -= bytes;
    }
  }
  static void add_up(std::vector<std::int64_t>& changes) {
    for (std::size_t i = 1; i < changes.size(); ++i) {
      changes[i] += changes[i - 1];
    }
  }

  std::int64_t bytes_between(const Access& access, const Access& next) const {
    return bytes_before_[next.use] - bytes_before_[access.use + 1];
  }
  std::int64_t own_bytes(std::size_t use) const {
    return bytes_before_[use + 1] - bytes_before_[use];
  }
  // For parameters that the use does not need itself.
  std::int64_t room(std::size_t use) const {
    return std::max<std::int64_t>(0, budgets_.live_limit_bytes - own_bytes(use));
  }
  std::size_t next_use(const Access& access) const {
    return access.next == kNone ? num_uses_ : accesses_[access.next].use;
  }

  void lay_out_what_is_held_anyway() {
    for (Access& access : accesses_) {
      const std::int64_t bytes = param_of(access).full_bytes;
      if (param_of(access).persists) {
        add_between(persistent_, access.use + 1, next_use(access), bytes);
      } else {
        access.stays = access.next != kNone && access.busy_until >= next_use(access);
        add_between(busy_, access.use + 1, std::min(access.busy_until, next_use(access)), bytes);
      }
    }
    add_up(persistent_);
    add_up(busy_);
  }

  // Belady, without prefetches: parameters wait for their next use until they are pushed out by
  // those that are used sooner. Only who is still there at its next use really stays.
  void decide_what_stays() {
    lay_out_what_is_held_anyway();
    std::vector<std::vector<std::size_t>> waits_from(num_uses_ + 1);
    for (std::size_t i = 0; i < accesses_.size(); ++i) {
      const Access& access = accesses_[i];
      if (access.next != kNone && !access.stays && !param_of(access).persists &&
          bytes_between(access, accesses_[access.next]) <= budgets_.reuse_distance_bytes) {
        waits_from[access.busy_until].push_back(i);
      }
    }
    std::set<std::pair<std::size_t, std::size_t>> waiting;  // next use, access
    std::int64_t waiting_bytes = 0;
    for (std::size_t use = 0; use < num_uses_; ++use) {
      for (const std::size_t i : waits_from[use]) {
        waiting.emplace(next_use(accesses_[i]), i);
        waiting_bytes += param_of(accesses_[i]).full_bytes;
      }
      for (const Access& access : accesses_of(use)) {
        if (access.previous != kNone && waiting.erase({use, access.previous}) == 1) {
          waiting_bytes -= param_of(access).full_bytes;
          accesses_[access.previous].stays = true;
        }
      }
      while (!waiting.empty() && waiting_bytes + persistent_[use] + busy_[use] > room(use)) {
        const auto farthest = std::prev(waiting.end());
        waiting_bytes -= param_of(accesses_[farthest->second]).full_bytes;
        waiting.erase(farthest);
      }
    }
    for (const Access& access : accesses_) {
      if (access.stays) {
        add_between(others_, access.busy_until, next_use(access), param_of(access).full_bytes);
      }
    }
    add_up(others_);
    for (std::size_t use = 0; use < num_uses_; ++use) {
      others_[use] += persistent_[use] + busy_[use];
    }
  }

  bool is_held_from_before(const Access& access) const {
    return access.previous != kNone &&
           (param_of(access).persists || accesses_[access.previous].stays);
  }
  bool is_provided_for(const Access& access) const {
    return access.prefetched || is_held_from_before(access);
  }
  // Not provided for, but still held during `now`, or by then: it can stay instead of being
  // gathered again.
  bool can_stay(const Access& access, std::size_t now) const {
    return access.previous != kNone && accesses_[access.previous].busy_until > now;
  }

  void prefetch_during(std::size_t now) {
    while (!inflight_.empty() && inflight_.front() <= now) {
      inflight_.pop_front();
    }
    call_bytes_ = -1;
    for (reached_ = std::max(reached_, now + 1); reached_ < num_uses_; ++reached_) {
      if (!provide_for(reached_, now)) {
        return;
      }
    }
  }

  // All of what `use` needs is held or on its way afterwards; false: not all of it can be.
  bool provide_for(std::size_t use, std::size_t now) {
    std::vector<Access*> missing;
    std::vector<Access*> staying;
    for (Access& access : accesses_of(use)) {
      if (!is_provided_for(access)) {
        (can_stay(access, now) ? staying : missing).push_back(&access);
      }
    }
    const auto max_inflight = static_cast<std::size_t>(budgets_.max_inflight);
    const std::size_t num_fitting =
        num_in_calls(missing, max_inflight - std::min(inflight_.size(), max_inflight));
    const bool is_whole = num_fitting == missing.size();
    // Part of a use is better than nothing only if the whole of it can never be in flight.
    if (!is_whole && !inflight_.empty()) {
      return false;
    }
    missing.resize(num_fitting);
    if (!take_room(missing, staying, now)) {
      return false;
    }
    add_calls(missing, use, now);
    return is_whole;
  }

  bool joins_call(std::int64_t call_bytes, bool is_of_use, std::int64_t bytes) const {
    return call_bytes >= 0 && (is_of_use || call_bytes < budgets_.merge_below_bytes) &&
           bytes <= budgets_.bucket_bytes - call_bytes;
  }

  // How many of the parameters fit into the call that is put together and `num_calls` more.
  std::size_t num_in_calls(const std::vector<Access*>& missing, std::size_t num_calls) const {
    std::int64_t call_bytes = call_bytes_;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      const std::int64_t bytes = param_of(*missing[i]).full_bytes;
      if (joins_call(call_bytes, i > 0, bytes)) {
        call_bytes += bytes;
      } else if (num_calls == 0) {
        return i;
      } else {
        --num_calls;
        call_bytes = bytes;
      }
    }
    return missing.size();
  }

  void add_calls(const std::vector<Access*>& missing, std::size_t use, std::size_t now) {
    for (std::size_t i = 0; i < missing.size(); ++i) {
      Access& access = *missing[i];
      const std::int64_t bytes = param_of(access).full_bytes;
      if (joins_call(call_bytes_, i > 0, bytes)) {
        call_bytes_ += bytes;
      } else {
        ++num_calls_;
        call_bytes_ = bytes;
        inflight_.push_back(use);
      }
      access.prefetched = true;
      gathers_.push_back({&access, now, num_calls_, 0});
    }
  }

  // See (3). The nearest next use first: it holds the room for the shortest time.
  void keep_more_in_the_room_that_is_left() {
    std::int64_t all_bytes = 0;
    for (const PlanParam& param : input_.params) {
      all_bytes += param.full_bytes;
    }
    if (all_bytes <= budgets_.live_limit_bytes) {
      return;
    }
    std::vector<std::size_t> gathered_from(accesses_.size(), kNone);  // by access: during which use
    for (const Gather& gather : gathers_) {
      gathered_from[index_of(*gather.access)] = gather.during;
    }
    std::vector<Access*> candidates;
    for (Access& access : accesses_) {
      if (access.next != kNone && !access.stays && !param_of(access).persists) {
        candidates.push_back(&access);
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](const Access* left, const Access* right) {
                       return next_use(*left) - left->use < next_use(*right) - right->use;
                     });
    for (Access* access : candidates) {
      Access& next = accesses_[access->next];
      const std::size_t from = gathered_from[access->next];
      const std::size_t end = next.prefetched ? from : next.use;
      const std::int64_t bytes = param_of(next).full_bytes;
      bool fits = true;
      for (std::size_t i = access->busy_until; i < end && fits; ++i) {
        fits = others_[i] + bytes <= room(i);
      }
      if (fits) {
        for (std::size_t i = access->busy_until; i < end; ++i) {
          others_[i] += bytes;
        }
        access->stays = true;
        next.prefetched = false;
      }
    }
    std::erase_if(gathers_, [](const Gather& gather) { return !gather.access->prefetched; });
  }
  std::size_t index_of(const Access& access) const {
    return static_cast<std::size_t>(&access - accesses_.data());
  }

  void write_down_prefetches() {
    std::size_t call = kNone;
    for (Gather& gather : gathers_) {
      std::vector<GatherList>& calls = planned(gather.during).prefetch;
      if (gather.call != call) {
        call = gather.call;
        calls.emplace_back();
      }
      gather.call = calls.size() - 1;
      gather.index = calls.back().size();
      calls.back().push_back(gather.access->param);
    }
  }

  // Holds these from `now` on, or from their last use on, until they are used, if that fits.
  bool take_room(const std::vector<Access*>& missing, const std::vector<Access*>& staying,
                 std::size_t now) {
    std::size_t end = now;
    const auto add = [&](int sign) {
      for (const Access* access : missing) {
        end = access->use;
        for (std::size_t i = now; i < access->use; ++i) {
          others_[i] += sign * param_of(*access).full_bytes;
        }
      }
      for (const Access* access : staying) {
        end = access->use;
        for (std::size_t i = accesses_[access->previous].busy_until; i < access->use; ++i) {
          others_[i] += sign * param_of(*access).full_bytes;
        }
      }
    };
    add(+1);
    for (std::size_t i = now; i < end; ++i) {
      if (others_[i] > room(i)) {
        add(-1);
        return false;
      }
    }
    for (const Access* access : staying) {
      accesses_[access->previous].stays = true;
    }
    return true;
  }

  void write_down(std::size_t use) {
    PlannedUse& plan = planned(use);
    for (Access& access : accesses_of(use)) {
      if (!is_provided_for(access)) {
        plan.demand.push_back(access.param);
        gathers_.push_back({&access, use, kNone, plan.demand.size() - 1});
      }
      if (!access.stays && !param_of(access).persists) {
        plan.release.push_back(access.param);
      }
    }
    plan_.peak_bytes = std::max(plan_.peak_bytes, own_bytes(use) + others_[use]);
  }

  // The use at whose end what is gathered for this access is released.
  std::size_t last_use(const Access* access) const {
    while (access->stays) {
      access = &accesses_[access->next];
    }
    return access->busy_until - 1;
  }

  // Parameters that persist lie at the bottom, at the same offset in every plan.
  void assign_arena_offsets() {
    std::vector<std::int64_t> persistent_offset(input_.params.size());
    std::int64_t bottom = 0;
    for (std::size_t id = 0; id < input_.params.size(); ++id) {
      if (input_.params[id].persists) {
        const std::int64_t end =
            bottom + static_cast<std::int64_t>(device::round_to_arena(
                         static_cast<std::size_t>(input_.params[id].full_bytes)));
        persistent_offset[id] = end <= input_.arena_bytes ? bottom : -1;
        bottom = end;
      }
    }
    std::vector<Lifetime> lifetimes;
    for (const Gather& gather : gathers_) {
      const PlanParam& param = param_of(*gather.access);
      const auto begin = static_cast<std::int64_t>(gather.during) * 2;
      const auto end = static_cast<std::int64_t>(last_use(gather.access)) * 2 + 1;
      lifetimes.push_back({param.persists ? 0 : param.full_bytes, begin, end});
    }
    const ArenaPlan arena =
        assign_offsets(lifetimes, std::max<std::int64_t>(0, input_.arena_bytes - bottom));
    plan_.num_unplaced = arena.num_unplaced;
    for (std::size_t i = 0; i < gathers_.size(); ++i) {
      const Gather& gather = gathers_[i];
      std::int64_t offset = arena.offsets[i] < 0 ? -1 : arena.offsets[i] + bottom;
      if (param_of(*gather.access).persists) {
        offset = persistent_offset[static_cast<std::size_t>(gather.access->param)];
      }
      PlannedUse& plan = planned(gather.during);
      plan.prefetch_offsets.resize(plan.prefetch.size());
      OffsetList& list =
          gather.call == kNone ? plan.demand_offsets : plan.prefetch_offsets[gather.call];
      list.resize(std::max(list.size(), gather.index + 1), -1);
      list[gather.index] = offset;
    }
  }

  const PlanInput& input_;
  const PlanBudgets& budgets_;
  const std::size_t num_uses_;
  std::vector<Access> accesses_;           // use by use
  std::vector<std::size_t> first_access_;  // by use
  std::vector<std::int64_t> bytes_before_;
  // By use: full bytes held while it runs, without its own; all of them, the persistent ones, and
  // those of uses around it.
  std::vector<std::int64_t> others_;
  std::vector<std::int64_t> persistent_;
  std::vector<std::int64_t> busy_;
  std::size_t reached_ = 0;           // uses before this one are provided for
  std::deque<std::size_t> inflight_;  // first use of each prefetch, in order
  std::int64_t call_bytes_ = -1;      // of the call that is put together; below zero: none
  std::size_t num_calls_ = 0;
  std::vector<Gather> gathers_;  // prefetches in order, then what is demanded
  PrefetchPlan plan_;
};

}  // namespace

PrefetchPlan make_plan(const PlanInput& input) { return Planner(input).make(); }

PrefetchPlan make_placed_plan(const PlanInput& input) {
  PrefetchPlan plan = make_plan(input);
  std::int64_t largest_unit = 0;
  for (const std::vector<int>& ids : input.unit_params) {
    std::int64_t bytes = 0;
    for (const int id : ids) {
      bytes += input.params[static_cast<std::size_t>(id)].full_bytes;
    }
    largest_unit = std::max(largest_unit, bytes);
  }
  const std::int64_t limit = std::min(input.budgets.live_limit_bytes, input.arena_bytes);
  constexpr int kTries = 8;
  for (int left = kTries - 1; left >= 0 && plan.num_unplaced > 0 && limit > largest_unit; --left) {
    PlanInput less = input;
    less.budgets.live_limit_bytes = largest_unit + (limit - largest_unit) / kTries * left;
    PrefetchPlan candidate = make_plan(less);
    if (candidate.num_unplaced < plan.num_unplaced) {
      plan = std::move(candidate);
    }
  }
  return plan;
}

std::int64_t room_to_persist(std::int64_t live_limit_bytes, std::int64_t largest_unit_bytes) {
  return std::max<std::int64_t>(0, live_limit_bytes - 2 * largest_unit_bytes);
}

std::vector<bool> choose_persistent(std::span<const std::int64_t> full_bytes,
                                    std::int64_t param_bytes, std::int64_t model_bytes,
                                    std::int64_t room_bytes) {
  std::vector<bool> persists(full_bytes.size());
  room_bytes = std::min(model_bytes, room_bytes);
  for (std::size_t i = 0; i < full_bytes.size(); ++i) {
    if (full_bytes[i] <= param_bytes && full_bytes[i] <= room_bytes) {
      persists[i] = true;
      room_bytes -= full_bytes[i];
    }
  }
  return persists;
}

}  // namespace tessera::coordinator
