// Walks along a plan, use by use, and checks every promise of prefetch_plan.h on the way. It knows
// nothing of how plans are made.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/coordinator/plan_walk.h"
#include "tessera/coordinator/prefetch_plan.h"

namespace tessera::coordinator {

class PlanSimulator {
 public:
  // Both outlive it.
  PlanSimulator(const PlanInput& input, const PrefetchPlan& plan)
      : input_(input), plan_(plan), walk_(input, plan) {}

  // What is wrong with the plan, in words; empty if nothing is. Once.
  std::string run();

  // After run().
  std::int64_t num_gathered_params() const { return num_gathered_params_; }
  std::int64_t num_calls() const { return num_calls_; }
  std::int64_t gathered_bytes() const { return gathered_bytes_; }

 private:
  const std::vector<int>& params_of(std::size_t use) const {
    return input_.unit_params[static_cast<std::size_t>(input_.uses[use].unit)];
  }
  std::int64_t bytes_of(int param) const {
    return input_.params[static_cast<std::size_t>(param)].full_bytes;
  }
  bool persists(int param) const { return input_.params[static_cast<std::size_t>(param)].persists; }
  bool is_used_at(int param, std::size_t use) const;
  std::size_t next_use(int param, std::size_t after) const;  // the number of uses if there is none
  bool is_within_limit(std::size_t use) const;
  std::size_t ends_after(std::size_t use) const;  // how many have begun by then

  void begin(std::size_t use);
  void check_prefetches(std::size_t use, const PlannedUse& planned);
  void check_prefetch(std::size_t use, const GatherList& list, std::vector<bool>& held);
  void end(std::size_t use);
  void place(std::size_t use, const GatherList& list, const OffsetList& offsets);
  void count(const GatherList& list);
  void expect(bool condition, std::size_t use, const std::string& what);

  const PlanInput& input_;
  const PrefetchPlan& plan_;
  PlanWalk walk_;
  std::map<int, std::size_t> promised_;  // prefetched parameter -> the use it is for
  std::map<int, std::pair<std::int64_t, std::int64_t>> places_;  // begin and end in the arena
  std::vector<std::size_t> inflight_;  // first use of each prefetch that is not used yet
  std::size_t reached_ = 0;            // prefetches are for this use or later ones
  std::int64_t peak_bytes_ = 0;
  std::int64_t num_gathered_params_ = 0;
  std::int64_t num_calls_ = 0;
  std::int64_t gathered_bytes_ = 0;
  std::string problem_;
};

}  // namespace tessera::coordinator
