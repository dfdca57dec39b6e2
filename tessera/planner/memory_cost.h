// Internal to planner: what placements and sizes cost, to the byte, as those who allocate charge
// it.
//
// A CPU's memory and pageable memory are taken in whole pages from 64 KiB on, pinned memory always,
// device memory as asked for, NVMe in whole blocks. Each shard has a block of its own.
//
// Gradients on a discrete device of one rank are a bound where there is one micro-batch: autograd's
// own memory, which is held while it is needed.
//
// Threads: plain data and pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/comm/staging.h"
#include "tessera/grad/gradient_bytes.h"
#include "tessera/optim/sub_group.h"
#include "tessera/planner/memory_plan.h"
#include "tessera/shard/layout.h"

namespace tessera::planner {

// Plans count in signed numbers, allocators in std::size_t.
inline std::int64_t as_int(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }
inline std::int64_t rounded_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

// A model cut for the ranks, with what is asked of it again and again.
struct CutModel {
  CutModel(const ModelShapes& shapes, const MemoryPlanOptions& options);

  std::size_t num_params() const { return layouts.size(); }
  bool is_trainable(std::size_t id) const { return model.params[id].trainable; }
  // fp32 tensors of a parameter: the master, where it is another tensor, and states.
  std::int64_t num_state_tensors() const {
    return as_int(optim::num_state_tensors(model.dtype, options.num_states));
  }
  // Of a parameter's states, as NVMe holds them: each tensor in blocks of its own.
  std::int64_t states_bytes(std::size_t id) const;
  std::int64_t full_gradient_bytes(std::size_t id) const;

  const ModelShapes& model;
  const MemoryPlanOptions& options;
  std::vector<shard::Layout> layouts;  // by id
};

using Placements = std::vector<Placement>;  // by id

std::int64_t taken_bytes(std::int64_t bytes);   // as host_memory.h: whole pages from 64 KiB on
std::int64_t region_bytes(std::int64_t bytes);  // that a group reserves: whole pages, pinned or not
std::int64_t block_bytes(std::int64_t bytes);   // whole blocks
// The largest whole number of pages, and of blocks, in it.
std::int64_t whole_pages_below(std::int64_t bytes);
// In memory, for so many bytes on NVMe; 0 where none are kept.
std::int64_t checksum_bytes(const MemoryPlanOptions& options, std::int64_t nvme_bytes);
// What an allocation in the tier is charged.
std::int64_t charged_bytes(const MemoryPlanOptions& options, Tier tier, std::int64_t bytes);
// Of buffers that NVMe is read into and written from: what a discrete device reads is pinned.
Tier io_tier(const MemoryPlanOptions& options);
std::int64_t pool_bytes(const MemoryPlanOptions& options, std::int64_t bytes);
// Of a loader with such a pool: tiles and window are blocks of their own.
std::int64_t feed_pool_bytes(const MemoryPlanOptions& options, std::int64_t bytes);

bool uses_nvme(const Placements& placements);

// What the CPU updates, in sub-groups.
optim::SubGroupPlan sub_groups(const CutModel& cut, const Placements& placements,
                               std::int64_t sub_group_numel);

// The bucket size of reductions: as given; else at most a quarter of all gradients, so that
// reductions begin before backward has ended, and no more than a budget can spare.
std::int64_t choose_bucket_bytes(const CutModel& cut);
// Where everything stays in one memory: the same without a budget; with one, whichever leaves room,
// so that what fits into one budget fits into every larger one. Largest first.
std::vector<std::int64_t> possible_bucket_bytes(const CutModel& cut);
// Elements of a bucket per rank: at most, for any placements and such a size.
struct BucketNumel {
  std::int64_t static_numel = 0;
  std::int64_t dynamic_numel = 0;
};
BucketNumel most_bucket_numel(const CutModel& cut, std::int64_t bucket_bytes);
// Slots, scratch and staging of reductions: at most, as above. Grows with the size of buckets
// evenly.
std::int64_t most_reduction_bytes(const CutModel& cut, std::int64_t bucket_bytes,
                                  std::int64_t num_micro_batches);

// What a reducer takes, besides buffers of I/O. On a discrete device without shards, which
// MemoryCost counts by placement.
struct GradientCost {
  grad::GradientBytes bytes;
  // Of the groups that reduce them: two calls at once. Dynamic ones that pass through the group of
  // gathers are GatherCost's.
  GroupStaging staging;
};
GradientCost gradient_cost(const CutModel& cut, const Placements& placements,
                           std::int64_t bucket_bytes, std::int64_t num_micro_batches);

// Dynamic parameters are reduced in groups of their own, and not in that of gathers.
bool has_agreed_groups(const MemoryPlanOptions& options);
// Of a reduction of so many elements per rank, in one hop: as the group takes it.
std::int64_t reduction_staging(std::int64_t shard_numel, const MemoryPlanOptions& options);

// Full gradients that copies, kernels or reductions still read, on a discrete device: what may be
// kept, whatever the placements are. Enough for the device to have work while the link is behind.
std::int64_t most_kept_gradients(const CutModel& cut);

// Charges by tier and role, while they are summed up; lines come out in that order.
class Lines {
 public:
  void add(Tier tier, Role role, std::int64_t bytes) {
    bytes_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)] += bytes;
  }
  std::int64_t bytes(Tier tier) const {
    const auto& roles = bytes_[static_cast<std::size_t>(tier)];
    return std::accumulate(roles.begin(), roles.end(), std::int64_t{0});
  }
  std::int64_t bytes(Tier tier, Role role) const {
    return bytes_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)];
  }
  std::vector<LedgerLine> take() const;

 private:
  std::array<std::array<std::int64_t, kNumRoles>, kNumTiers> bytes_{};
};

// Discrete device: what host memory has of several micro-batches' gradients.
enum class HostGradients : std::uint8_t {
  kGood,   // buffers enough that nothing waits until threads have added up what came before
  kLeast,  // as few as do
};
// Of a parameter, unless it is summed over replicas: then it is one sum in fp32, and one buffer.
int host_gradient_buffers(const CutModel& cut, std::int64_t num_micro_batches, HostGradients kind);
// A shard as it travels in gathers.
comm::GatherPiece piece_of(const CutModel& cut, std::size_t id);
// Of a parameter, beside its shard (coordinator/secondary_shards.h), as shards travel; 0: it has
// none.
std::int64_t secondary_shard_bytes(const CutModel& cut, std::size_t id);
// Of a shard, as gathers send it, on the device (coordinator/encoded_shards.h); 0: as it is.
std::int64_t encoded_shard_bytes(const CutModel& cut, std::size_t id);
// What measures their error, on the device; the host has a copy.
std::int64_t encoding_sums_bytes(const CutModel& cut);
// All that gathers of encoded shards hold, as it is charged to the device, or where device and host
// are one memory.
std::int64_t encoding_bytes(const CutModel& cut);
// What those in the tier are charged: kDevice, or kHost of a discrete device.
std::int64_t secondary_bytes(const CutModel& cut, const Placements& placements, Tier tier);

class MemoryCost {
 public:
  MemoryCost(const CutModel& cut, std::int64_t num_micro_batches,
             HostGradients host_gradients = HostGradients::kGood);

  // Of every shard and its gradient: all but arena, slots, pools and checksums.
  Lines shard_lines(const Placements& placements, const GradientCost& gradients) const;
  // Of a slot, per element: for gradients of several micro-batches, which the device adds up there.
  std::int64_t slot_gradient_bytes() const;
  std::int64_t num_micro_batches() const { return num_micro_batches_; }
  // Fills in what follows from placements and sizes: ledger, step, link, update, staging of the
  // groups, uses_nvme, kept and full gradients.
  void complete(MemoryPlan& plan) const;

 private:
  // Discrete device: of one micro-batch's gradient; of what stays on the device; of what the host
  // has of all micro-batches.
  std::int64_t reduced_bytes_per_element() const;
  std::int64_t device_gradient_bytes_per_element(std::size_t id) const;
  std::int64_t host_gradient_bytes(std::size_t id) const;
  std::int64_t host_gradient_bytes_read(std::size_t id) const;  // by the update, per element
  std::int64_t kept_gradients(const Placements& placements) const;
  AccumulationNumel accumulation(const Placements& placements) const;
  void count_step(MemoryPlan& plan) const;
  // Discrete device: who updates, and what is copied for it.
  void count_update(std::size_t id, const Placement& placement, MemoryPlan& plan) const;
  // The device makes new parameters in the place of their gradients, and the first forward takes
  // them from there (optim/device_executor.h, [Note: in place of the gradient]).
  bool updates_in_place() const;
  bool stays_on_device_once(std::size_t id, const Placement& placement) const;

  const CutModel& cut_;
  const MemoryPlanOptions& options_;
  const std::int64_t num_micro_batches_;
  const HostGradients host_gradients_;
};

}  // namespace tessera::planner
