#include "tests/coordinator/plan_simulator.h"

#include <algorithm>
#include <set>

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
  return walk_.held_bytes() <= std::max(input_.budgets.live_limit_bytes, running_bytes);
}

std::size_t PlanSimulator::ends_after(std::size_t use) const {
  return input_.open_until.empty() ? use + 1 : std::size_t{input_.open_until[use]};
}

void PlanSimulator::expect(bool condition, std::size_t use, const std::string& what) {
  if (!condition && problem_.empty()) {
    problem_ = detail::concat("use ", use, ": ", what);
  }
}

void PlanSimulator::count(const GatherList& list) {
  for (const int param : list) {
    gathered_bytes_ += bytes_of(param);
    ++num_gathered_params_;
  }
  num_calls_ += list.empty() ? 0 : 1;
}

void PlanSimulator::begin(std::size_t use) {
  const PlannedUse& planned = plan_.uses[use];
  for (const int param : planned.release) {
    expect(is_used_at(param, use), use, detail::concat("releases ", param, ", which is not its"));
  }
  expect(walk_.begin_use() == planned.demand, use, "does not demand exactly what is missing");
  count(planned.demand);
  place(use, planned.demand, planned.demand_offsets);
  for (const int param : params_of(use)) {
    if (promised_.contains(param)) {
      expect(promised_[param] == use, use,
             detail::concat(param, " was prefetched for another use"));
      promised_.erase(param);
    }
  }
  std::erase_if(inflight_, [&](std::size_t first_use) { return first_use <= use; });
  expect(is_within_limit(use), use, "over the limit at begin");
  peak_bytes_ = std::max(peak_bytes_, walk_.held_bytes());
}

void PlanSimulator::check_prefetch(std::size_t use, const GatherList& list,
                                   std::vector<bool>& held) {
  expect(input_.budgets.bucket_bytes > 0, use, "prefetches although that is off");
  expect(!list.empty(), use, "an empty prefetch");
  count(list);
  std::int64_t bytes = 0;
  std::set<std::size_t> uses;
  for (const int param : list) {
    const std::size_t target = next_use(param, use);
    expect(!held[static_cast<std::size_t>(param)], use,
           detail::concat("gathers ", param, ", which is held"));
    held[static_cast<std::size_t>(param)] = true;
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
      expect(held[static_cast<std::size_t>(param)], use,
             detail::concat("prefetches for use ", *uses.rbegin(), ", but ", param, " of use ",
                            later, " is not held"));
    }
  }
}

void PlanSimulator::check_prefetches(std::size_t use, const PlannedUse& planned) {
  std::vector<bool> held(input_.params.size());
  for (std::size_t id = 0; id < held.size() && use < input_.uses.size(); ++id) {
    held[id] = walk_.is_held(static_cast<int>(id));
  }
  for (std::size_t i = 0; i < planned.prefetch.size(); ++i) {
    check_prefetch(use, planned.prefetch[i], held);
    place(use, planned.prefetch[i],
          input_.arena_bytes > 0 ? planned.prefetch_offsets[i] : OffsetList());
  }
  if (use < input_.uses.size()) {
    walk_.start_prefetches();
  }
  expect(is_within_limit(use), use, "over the limit after its prefetches");
  peak_bytes_ = std::max(peak_bytes_, walk_.held_bytes());
}

void PlanSimulator::end(std::size_t use) {
  for (const int param : walk_.end_uses()) {
    expect(!persists(param), use, detail::concat("releases ", param, ", which persists"));
    expect(!promised_.contains(param), use, detail::concat("releases ", param, " before its use"));
    places_.erase(param);
  }
  for (std::size_t id = 0; id < input_.params.size(); ++id) {
    const int param = static_cast<int>(id);
    expect(!walk_.is_wanted(param) || persists(param) || next_use(param, use) < input_.uses.size(),
           use, detail::concat("keeps ", param, " for nothing"));
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

std::string PlanSimulator::run() {
  if (plan_.uses.size() != input_.uses.size()) {
    return "not one entry per use";
  }
  constexpr auto kBefore = static_cast<std::size_t>(-1);
  check_prefetches(kBefore, plan_.ahead);
  for (std::size_t use = 0; use < plan_.uses.size(); ++use) {
    begin(use);
    check_prefetches(use, plan_.uses[use]);
    end(use);
  }
  expect(peak_bytes_ == plan_.peak_bytes, plan_.uses.size(),
         detail::concat("peak ", plan_.peak_bytes, " is said, ", peak_bytes_, " was seen"));
  return problem_;
}

}  // namespace tessera::coordinator
