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

std::int64_t PlanSimulator::held_bytes_without(std::size_t use) const {
  std::int64_t bytes = 0;
  for (const int param : held_) {
    if (use >= input_.uses.size() || !is_used_at(param, use)) {
      bytes += bytes_of(param);
    }
  }
  return bytes;
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
  expect(held_bytes_without(use) <= input_.budgets.live_limit_bytes, use,
         "over the limit at begin");
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
  expect(bytes <= input_.budgets.bucket_bytes || uses.size() == 1, use,
         detail::concat("a prefetch of ", bytes, " bytes for ", uses.size(), " uses"));
  expect(static_cast<int>(inflight_.size()) <= input_.budgets.max_inflight, use,
         "too many prefetches in flight");
  // Whole uses, none passed over: all that is needed up to the last of them is held now.
  for (std::size_t later = use + 1; !uses.empty() && later <= *uses.rbegin(); ++later) {
    for (const int param : params_of(later)) {
      expect(held_.contains(param), use,
             detail::concat("prefetches for use ", *uses.rbegin(), ", but ", param, " of use ",
                            later, " is not held"));
    }
  }
}

void PlanSimulator::end(std::size_t use, const PlannedUse& planned) {
  for (const int param : planned.release) {
    expect(is_used_at(param, use), use, detail::concat("releases ", param, ", which is not its"));
    expect(!persists(param), use, detail::concat("releases ", param, ", which persists"));
    expect(!promised_.contains(param), use, detail::concat("releases ", param, " before its use"));
    expect(held_.erase(param) == 1, use, detail::concat("releases ", param, ", which is not held"));
  }
  for (const int param : params_of(use)) {
    if (held_.contains(param) && !persists(param)) {
      expect(next_use(param, use) < input_.uses.size(), use,
             detail::concat("keeps ", param, " for nothing"));
    }
  }
  expect(held_bytes_without(use + 1) <= input_.budgets.live_limit_bytes, use,
         "over the limit at end");
}

std::string PlanSimulator::run(const PrefetchPlan& plan) {
  if (plan.uses.size() != input_.uses.size()) {
    return "not one entry per use";
  }
  for (std::size_t use = 0; use < plan.uses.size(); ++use) {
    begin(use, plan.uses[use]);
    peak_bytes_ = std::max(peak_bytes_, held_bytes());
    for (const GatherList& list : plan.uses[use].prefetch) {
      prefetch(use, list);
      peak_bytes_ = std::max(peak_bytes_, held_bytes());
      expect(held_bytes_without(use) <= input_.budgets.live_limit_bytes, use,
             "over the limit after a prefetch");
    }
    end(use, plan.uses[use]);
  }
  expect(peak_bytes_ == plan.peak_bytes, plan.uses.size(),
         detail::concat("peak ", plan.peak_bytes, " is said, ", peak_bytes_, " was seen"));
  return problem_;
}

}  // namespace tessera::coordinator
