// Internal to planner: what places on a device with memory of its own cost, to the byte, as those
// who allocate charge it: device memory as asked for, pinned memory in whole pages, each shard in a
// block of its own.
//
// Gradients on the device are a bound: autograd's own memory, which is held while it is needed.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/planner/ledger_lines.h"
#include "tessera/planner/placement_cost.h"

namespace tessera::planner {

// Room on the device for sub-groups whose states come to it.
struct SlotNeed {
  std::int64_t slot_bytes = 0;
  std::int64_t num_sub_groups = 0;  // that are streamed
};

class CudaCost {
 public:
  CudaCost(const CutModel& cut, std::int64_t num_micro_batches);

  bool is_small(std::size_t id) const;
  bool gradients_leave_early() const { return gradients_leave_early_; }
  std::int64_t bucket_bytes() const { return bucket_bytes_; }
  std::int64_t num_state_tensors() const { return num_state_tensors_; }

  // Of every shard and its gradient: all but arena, slots, pools and checksums.
  Lines shard_lines(const std::vector<ShardPlaces>& places) const;
  SlotNeed slot_need(const std::vector<ShardPlaces>& places, std::int64_t slot_numel) const;
  // Of the groups, whatever the arena is.
  std::int64_t most_comm_bytes() const;
  // In the arena, if it holds all that is gathered.
  std::int64_t gathered_bytes(const std::vector<ShardPlaces>& places) const;
  // What the processor updates, as the sub-groups of a model in which the rest is frozen.
  optim::SubGroupPlan processor_groups(const std::vector<ShardPlaces>& places,
                                       std::int64_t sub_group_numel) const;

  // Fills in ledger, step, link, staging of the groups, uses_nvme and full_gradient_bytes from
  // places and sizes.
  void complete(Placement& placement) const;

 private:
  void count_step(const optim::SubGroupPlan& plan, bool holds_all, Placement& placement) const;
  std::int64_t gradient_bytes_per_element() const;
  std::int64_t kept_gradients(const std::vector<ShardPlaces>& places) const;
  // The first forward after its update takes it from where the device has made it
  // (optim/device_executor.h, [Note: in place of the gradient]).
  bool stays_on_device_once(std::size_t id, const ShardPlaces& places) const;

  const CutModel& cut_;
  const std::int64_t num_micro_batches_;
  const bool gradients_leave_early_;
  const std::int64_t bucket_bytes_;
  const std::int64_t num_state_tensors_;
  GradientCost reductions_;  // of several ranks
};

// Of full gradients that copies or kernels still read, in a group of one: what may be kept,
// whatever is where. Enough for the device to have work while the link is behind.
std::int64_t most_kept_gradients(const CutModel& cut);

// Of one block, which has pages of its own whatever its size.
std::int64_t pinned_bytes(std::int64_t bytes);

// Of a feed with such a pool: tiles and window are blocks of their own.
std::int64_t pinned_feed_bytes(std::int64_t pool_bytes);

// The model as the processor's update sees it: what the device updates is frozen there.
ModelShapes processor_model(const ModelShapes& model, const std::vector<ShardPlaces>& places);

}  // namespace tessera::planner
