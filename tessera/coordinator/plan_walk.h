// A plan carried out on paper, use by use: what is gathered, held and freed. The coordinator
// follows one along a pass, inspection and the tests' simulator run one through. Pure.
//
// A use begins: what is not held of it is gathered, and what the plan lists as its prefetches is
// started. What it keeps is decided then (is_wanted), and what it does not keep is freed when the
// last running use of it ends. Uses end as PlanInput::open_until says.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/coordinator/prefetch_plan.h"

namespace tessera::coordinator {

class PlanWalk {
 public:
  // What `input` refers to and `plan` outlive the walk. The calls ahead of the first use are
  // started.
  PlanWalk(const PlanInput& input, const PrefetchPlan& plan);

  std::size_t position() const { return position_; }  // uses that have begun

  // The next use begins. Returns those of its parameters that were not held: its demand.
  GatherList begin_use();
  // Of the use that has begun last.
  void start_prefetches() { start(plan_->uses[position_ - 1]); }
  // That use ends, and those around it that end with it. Returns what is freed.
  std::vector<int> end_uses();
  // All three, up to `position` uses.
  void advance_to(std::size_t position);

  bool is_held(int param) const { return is_wanted(param) || num_users_[index_of(param)] > 0; }
  std::int64_t held_bytes() const { return held_bytes_; }
  // Stays once no running use needs it.
  bool is_wanted(int param) const { return wanted_[index_of(param)]; }
  const std::vector<bool>& wanted() const { return wanted_; }
  // Prefetches that no use has needed yet, in order.
  std::vector<GatherList> outstanding() const;

 private:
  static std::size_t index_of(int param) { return static_cast<std::size_t>(param); }
  const std::vector<int>& params_of(std::size_t use) const {
    return input_.unit_params[static_cast<std::size_t>(input_.uses[use].unit)];
  }
  std::int64_t bytes_of(int param) const { return input_.params[index_of(param)].full_bytes; }
  void start(const PlannedUse& planned);

  PlanInput input_;
  const PrefetchPlan* plan_;
  std::size_t position_ = 0;
  std::vector<std::size_t> running_;  // uses
  std::int64_t held_bytes_ = 0;
  // By parameter id.
  std::vector<bool> wanted_;
  std::vector<bool> is_unused_;  // since its last prefetch
  std::vector<int> num_users_;   // running uses
};

}  // namespace tessera::coordinator
