#include "tessera/coordinator/plan_walk.h"

#include <utility>

namespace tessera::coordinator {

PlanWalk::PlanWalk(const PlanInput& input, const PrefetchPlan& plan)
    : input_(input),
      plan_(&plan),
      wanted_(input.params.size()),
      is_unused_(input.params.size()),
      num_users_(input.params.size()) {
  start(plan.ahead);
}

void PlanWalk::start(const PlannedUse& planned) {
  for (const GatherList& list : planned.prefetch) {
    for (const int id : list) {
      held_bytes_ += is_held(id) ? 0 : bytes_of(id);
      wanted_[index_of(id)] = true;
      is_unused_[index_of(id)] = true;
    }
  }
}

GatherList PlanWalk::begin_use() {
  const std::size_t use = position_++;
  GatherList demand;
  for (const int id : params_of(use)) {
    if (!is_held(id)) {
      demand.push_back(id);
      held_bytes_ += bytes_of(id);
    }
    ++num_users_[index_of(id)];
    wanted_[index_of(id)] = true;
    is_unused_[index_of(id)] = false;
  }
  for (const int id : plan_->uses[use].release) {
    wanted_[index_of(id)] = false;
  }
  running_.push_back(use);
  return demand;
}

std::vector<int> PlanWalk::end_uses() {
  std::vector<int> freed;
  std::erase_if(running_, [&](std::size_t use) {
    if (!input_.open_until.empty() && input_.open_until[use] > position_) {
      return false;
    }
    for (const int id : params_of(use)) {
      if (--num_users_[index_of(id)] == 0 && !is_wanted(id)) {
        freed.push_back(id);
        held_bytes_ -= bytes_of(id);
      }
    }
    return true;
  });
  return freed;
}

void PlanWalk::advance_to(std::size_t position) {
  while (position_ < position) {
    begin_use();
    start_prefetches();
    end_uses();
  }
}

std::vector<GatherList> PlanWalk::outstanding() const {
  std::vector<const GatherList*> calls;
  const auto add = [&](const PlannedUse& planned) {
    for (const GatherList& list : planned.prefetch) {
      calls.push_back(&list);
    }
  };
  add(plan_->ahead);
  for (std::size_t use = 0; use < position_; ++use) {
    add(plan_->uses[use]);
  }
  // A parameter may be prefetched several times; only the last call is outstanding.
  std::vector<bool> is_unused = is_unused_;
  std::vector<GatherList> outstanding;
  for (std::size_t i = calls.size(); i-- > 0;) {
    GatherList left;
    for (const int id : *calls[i]) {
      if (is_unused[index_of(id)]) {
        left.push_back(id);
        is_unused[index_of(id)] = false;
      }
    }
    if (!left.empty()) {
      outstanding.insert(outstanding.begin(), std::move(left));
    }
  }
  return outstanding;
}

}  // namespace tessera::coordinator
