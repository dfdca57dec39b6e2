// Internal to planner: what a plan for one memory and one for a discrete device share: options,
// sizes that follow from placements, and refusals with their arithmetic.
//
// Threads: plain data and pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/planner/memory_cost.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/planner/nvme_buffers.h"

namespace tessera::planner {

// A sum of bytes, and its arithmetic in words.
class ByteSum {
 public:
  void add(const std::string& what, std::int64_t bytes) {
    if (bytes > 0) {
      text_ << (total_ > 0 ? " + " : "") << approximate_bytes(bytes) << " " << what;
      total_ += bytes;
    }
  }
  std::int64_t total() const { return total_; }
  std::string text() const { return text_.str(); }

 private:
  std::int64_t total_ = 0;
  std::ostringstream text_;
};

class Planner {
 public:
  Planner(const CutModel& cut, std::int64_t num_micro_batches,
          HostGradients host_gradients = HostGradients::kGood)
      : cut_(cut), options_(cut.options), cost_(cut, num_micro_batches, host_gradients) {
    std::int64_t room = options_.parameters_host_bytes;
    for (std::size_t i = 0; i < cut_.num_params(); ++i) {
      const auto bytes = as_int(cut_.layouts[i].shard_bytes());
      const bool stays = may_leave_device(i) && bytes <= room;
      room -= stays && room != kUnlimited ? bytes : 0;
      stays_off_nvme_.push_back(stays || bytes == 0);
    }
  }

 protected:
  bool is_small(std::size_t id) const {
    return as_int(cut_.layouts[id].full_bytes()) <= options_.small_param_bytes;
  }
  bool may_leave_device(std::size_t id) const { return !options_.is_discrete || !is_small(id); }
  // Where parameters were asked to be on NVMe: this one is among those that stay in memory.
  bool stays_off_nvme(std::size_t id) const { return stays_off_nvme_[id]; }
  bool has_states() const { return cut_.num_state_tensors() > 0; }

  // One rank on a discrete device may hold all, unless a limit was given; ranks are there to hold
  // less.
  bool has_live_limit() const {
    return !options_.is_discrete || options_.is_live_limit_given || options_.num_ranks > 1;
  }
  std::int64_t whole_arena(const Placements& placements) const {
    return whole_arena_bytes(cut_, placements,
                             has_live_limit() ? options_.live_limit_bytes : kUnlimited);
  }
  void set_arena(std::int64_t arena_bytes, MemoryPlan& plan) const {
    const std::int64_t whole = whole_arena(plan.params);
    plan.arena_bytes = std::min(arena_bytes, whole);
    plan.live_limit_bytes = arena_bytes < whole              ? arena_bytes
                            : has_live_limit() || whole == 0 ? options_.live_limit_bytes
                                                             : gathered_bytes(cut_, plan.params);
  }
  void set_optimizer_pool(const OptimizerBuffers::Choice& choice, MemoryPlan& plan) const {
    const auto lease_bytes =
        as_int(sub_groups(cut_, plan.params, choice.sub_group_numel).max_lease_bytes);
    plan.sub_group_numel = choice.sub_group_numel;
    plan.num_optimizer_buffers = lease_bytes > 0 ? choice.num_buffers : 0;
    plan.optimizer_pool_bytes = plan.num_optimizer_buffers * lease_bytes;
  }

  // `num_sharing`: ranks of the machine whose memory the budget was found from; 0: it was given.
  [[noreturn]] void refuse(const ByteSum& need, const char* memory, const char* budget,
                           std::int64_t budget_bytes, int num_sharing,
                           const char* otherwise) const {
    const std::string what =
        detail::concat("the model does not fit: one of ", options_.num_ranks,
                       options_.num_ranks == 1 ? " rank" : " ranks", " needs ",
                       approximate_bytes(need.total()), " of ", memory, ": ", need.text(), "; ");
    TESSERA_CHECK(num_sharing > 0, ConfigError, what, budget, " allows ",
                  approximate_bytes(budget_bytes), ". Raise ", budget, " to at least ",
                  exact_bytes(need.total()), otherwise);
    const bool is_host = std::string_view(budget) == "memory.host";
    throw ConfigError(detail::concat(
        what, is_host ? "this machine has " : "the device has ", approximate_bytes(budget_bytes),
        " left for ",
        num_sharing == 1 ? std::string("it") : detail::concat("each of ", num_sharing, " ranks"),
        is_host ? "" : " beside activations", ". Use more ", is_host ? "machines" : "devices",
        num_sharing == 1 ? "" : ", or fewer ranks on each",
        is_host && !options_.has_nvme
            ? ", or give a directory for what does not fit (nvme.paths, --nvme DIR)"
            : "",
        "; ", budget, " = unlimited trains without this check"));
  }
  const char* more_ranks_or_nvme() const {
    return options_.has_nvme ? ", or use more ranks"
                             : ", use more ranks, or give a directory for what does not fit "
                               "(nvme.paths, --nvme DIR)";
  }

  const CutModel& cut_;
  const MemoryPlanOptions& options_;
  const MemoryCost cost_;

 private:
  std::vector<bool> stays_off_nvme_;  // by id
};

}  // namespace tessera::planner
