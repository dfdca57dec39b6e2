#include "tests/coordinator/plan_simulator.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::coordinator {

bool PlanSimulator::is_used_at(int param, std::size_t use) const {
  const std::vector<int>& params = params_of(use);
  return std::find(params.begin(), params.end(), param) != params.end();
}

std::size_t PlanSimulator::next_use(int param, std::size_t after) const {
  std::size_t use = after + 1;
  while (use < input_.uses.size() && !is_used_at(param, use)) {
    ++use;
  }
  return use;
}

std::int64_t PlanSimulator::held_bytes() const {
  std::int64_t bytes = 0;
  for (const int param : held_) {
    bytes += bytes_of(param);
  }
  return bytes;
}

// What the running uses need alone may be over the limit.
bool PlanSimulator::is_within_limit(std::size_t use) const {
  std::set<int> running;
  for (std::size_t i = 0; i <= use && use < input_.uses.size(); ++i) {
    if (i == use || ends_after(i) > use) {
      running.insert(params_of(i).begin(), params_of(i).end());
    }
  }
  std::int64_t running_bytes = 0;
  for (const int param : running) {
    running_bytes += bytes_of(param);
  }
  return held_bytes() <= std::max(input_.budgets.live_limit_bytes, running_bytes);
}

std::size_t PlanSimulator::ends_after(std::size_t use) const {
  return input_.open_until.empty() ? use + 1 : std::size_t{input_.open_until[use]};
}

void PlanSimulator::expect(bool condition, std::size_t use, const std::string& what) {
  if (!condition && problem_.empty()) {
    problem_ = detail::concat("use ", use, ": ", what);
  }
}

void PlanSimulator::gather(std::size_t use, const GatherList& list) {
  for (const int param : list) {
    expect(held_.insert(param).second, use, detail::concat("gathers ", param, ", which is held"));
    gathered_bytes_ += bytes_of(param);
    ++num_gathered_params_;
  }
  num_calls_ += list.empty() ? 0 : 1;
}

void PlanSimulator::begin(std::size_t use, const PlannedUse& planned) {
  gather(use, planned.demand);
  for (const int param : planned.demand) {
    expect(is_used_at(param, use), use, detail::concat("demands ", param, ", which is not its"));
  }
  for (const int param : params_of(use)) {
    expect(held_.contains(param), use, detail::concat("parameter ", param, " is missing"));
    if (promised_.contains(param)) {
      expect(promised_[param] == use, use,
             detail::concat(param, " was prefetched for another use"));
      promised_.erase(param);
    }
  }
  std::erase_if(inflight_, [&](std::size_t first_use) { return first_use <= use; });
  expect(is_within_limit(use), use, "over the limit at begin");
}

void PlanSimulator::prefetch(std::size_t use, const GatherList& list) {
  expect(input_.budgets.bucket_bytes > 0, use, "prefetches although that is off");
  expect(!list.empty(), use, "an empty prefetch");
  gather(use, list);
  std::int64_t bytes = 0;
  std::set<std::size_t> uses;
  for (const int param : list) {
    const std::size_t target = next_use(param, use);
    expect(target < input_.uses.size(), use, detail::concat("prefetches ", param, " for nothing"));
    expect(target >= reached_, use, "prefetches out of the order of uses");
    reached_ = target;
    promised_[param] = target;
    uses.insert(target);
    bytes += bytes_of(param);
  }
  inflight_.push_back(uses.empty() ? use : *uses.begin());
  expect(bytes <= input_.budgets.bucket_bytes || list.size() == 1, use,
         detail::concat("a prefetch of ", bytes, " bytes, ", list.size(), " parameters"));
  expect(static_cast<int>(inflight_.size()) <= input_.budgets.max_inflight, use,
         "too many prefetches in flight");
  // None passed over: all that is needed before the last of them is held now.
  for (std::size_t later = use + 1; !uses.empty() && later < *uses.rbegin(); ++later) {
    for (const int param : params_of(later)) {
      expect(held_.contains(param), use,
             detail::concat("prefetches for use ", *uses.rbegin(), ", but ", param, " of use ",
                            later, " is not held"));
    }
  }
}

// Released when the last use that is running has ended.
void PlanSimulator::end(std::size_t use) {
  for (std::size_t i = 0; i <= use; ++i) {
    if (ends_after(i) != use + 1) {
      continue;
    }
    for (const int param : params_of(i)) {
      bool is_running = false;
      std::size_t latest = i;
      for (std::size_t other = 0; other <= use; ++other) {
        if (is_used_at(param, other)) {
          is_running = is_running || ends_after(other) > use + 1;
          latest = other;
        }
      }
      if (!is_running && is_released_by_.contains({latest, param}) && held_.contains(param)) {
        expect(!persists(param), use, detail::concat("releases ", param, ", which persists"));
        expect(!promised_.contains(param), use,
               detail::concat("releases ", param, " before its use"));
        held_.erase(param);
        places_.erase(param);
      } else if (!is_running && held_.contains(param) && !persists(param)) {
        expect(next_use(param, use) < input_.uses.size(), use,
               detail::concat("keeps ", param, " for nothing"));
      }
    }
  }
  expect(use + 1 == input_.uses.size() || is_within_limit(use + 1) || is_within_limit(use), use,
         "over the limit at end");
}

void PlanSimulator::place(std::size_t use, const GatherList& list, const OffsetList& offsets) {
  if (input_.arena_bytes == 0) {
    return;
  }
  expect(offsets.size() == list.size(), use, "not one offset per parameter");
  for (std::size_t i = 0; i < std::min(list.size(), offsets.size()); ++i) {
    if (offsets[i] < 0 || bytes_of(list[i]) == 0) {
      continue;
    }
    const std::int64_t end = offsets[i] + bytes_of(list[i]);
    expect(end <= input_.arena_bytes && offsets[i] % 256 == 0, use,
           detail::concat(list[i], " is placed outside of the arena, at ", offsets[i]));
    for (const auto& [other, range] : places_) {
      expect(end <= range.first || range.second <= offsets[i], use,
             detail::concat(list[i], " is placed over ", other));
    }
    places_[list[i]] = {offsets[i], end};
  }
}

std::string PlanSimulator::run(const PrefetchPlan& plan) {
  if (plan.uses.size() != input_.uses.size()) {
    return "not one entry per use";
  }
  for (std::size_t use = 0; use < plan.uses.size(); ++use) {
    for (const int param : plan.uses[use].release) {
      expect(is_used_at(param, use), use, detail::concat("releases ", param, ", which is not its"));
      is_released_by_.insert({use, param});
    }
  }
  constexpr auto kBefore = static_cast<std::size_t>(-1);
  prefetch_all(kBefore, plan.ahead);
  for (std::size_t use = 0; use < plan.uses.size(); ++use) {
    begin(use, plan.uses[use]);
    place(use, plan.uses[use].demand, plan.uses[use].demand_offsets);
    peak_bytes_ = std::max(peak_bytes_, held_bytes());
    prefetch_all(use, plan.uses[use]);
    end(use);
  }
  expect(peak_bytes_ == plan.peak_bytes, plan.uses.size(),
         detail::concat("peak ", plan.peak_bytes, " is said, ", peak_bytes_, " was seen"));
  return problem_;
}

void PlanSimulator::prefetch_all(std::size_t use, const PlannedUse& planned) {
  for (std::size_t i = 0; i < planned.prefetch.size(); ++i) {
    prefetch(use, planned.prefetch[i]);
    if (input_.arena_bytes > 0) {
      place(use, planned.prefetch[i], planned.prefetch_offsets[i]);
    }
    peak_bytes_ = std::max(peak_bytes_, held_bytes());
    expect(is_within_limit(use), use, "over the limit after a prefetch");
  }
}

}  // namespace tessera::coordinator
