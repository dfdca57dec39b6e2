// Internal to planner: what a choice of places and sizes costs, to the byte, as those who allocate
// charge it.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/grad/gradient_bytes.h"
#include "tessera/optim/sub_group.h"
#include "tessera/planner/placement.h"
#include "tessera/shard/layout.h"

namespace tessera::planner {

// Plans count in signed numbers, allocators in std::size_t.
inline std::int64_t as_int(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }

// A model cut for the ranks, with what is asked of it again and again.
struct CutModel {
  CutModel(const ModelShapes& shapes, const PlacementOptions& options);

  std::size_t num_params() const { return layouts.size(); }
  bool is_trainable(std::size_t id) const { return model.params[id].trainable; }

  const ModelShapes& model;
  const PlacementOptions& options;
  std::vector<shard::Layout> layouts;  // by id
};

// As host_memory.h takes them: whole pages from 64 KiB on.
std::int64_t taken_bytes(std::int64_t bytes);
std::int64_t block_bytes(std::int64_t bytes);  // whole blocks

bool uses_nvme(const std::vector<ShardPlaces>& places);
// In memory, for so many bytes on NVMe.
std::int64_t checksum_bytes(std::int64_t nvme_bytes);

// Every unit that needs a stored parameter reads it in forward and in backward, unless it is still
// there: bytes of one micro-batch, at most.
std::int64_t stored_parameter_uses(const CutModel& cut, const std::vector<ShardPlaces>& places);
// Of stored shards that fit into the window of their feed (coordinator/shard_loader.h), which takes
// new values from the update: in time, where the disk is what the update waits for.
std::int64_t parameters_from_update(const CutModel& cut, const std::vector<ShardPlaces>& places,
                                    std::int64_t pool_bytes);

// Whether the parameter, where it lives as `places` says, is gathered into the arena.
bool is_gathered(const CutModel& cut, const ShardPlaces& places);

// Gathered bytes of one unit, as the arena takes them.
struct UnitBytes {
  std::size_t unit = 0;
  std::int64_t bytes = 0;
};
UnitBytes largest_unit(const CutModel& cut, const std::vector<ShardPlaces>& places);
// As the coordinator makes it: room for `live_limit_bytes`, but for no more than all, and for the
// largest unit.
std::int64_t whole_arena_bytes(const CutModel& cut, const std::vector<ShardPlaces>& places,
                               std::int64_t live_limit_bytes);

// The bucket size of reductions: as given; else at most a quarter of all gradients, so that
// reductions begin before backward has ended, and no more than a budget can spare.
std::int64_t choose_bucket_bytes(const CutModel& cut);
// Where everything stays in memory: the same without a budget; with one, whichever leaves room, so
// that what fits into one budget fits into every larger one. Largest first.
std::vector<std::int64_t> possible_bucket_bytes(const CutModel& cut);

// What gradients take, besides the buffers of I/O.
struct GradientCost {
  grad::GradientBytes bytes;
  std::int64_t staging = 0;  // of the group that reduces them, but for dynamic ones: two at once
};
GradientCost gradient_cost(const CutModel& cut, const std::vector<ShardPlaces>& places,
                           std::int64_t bucket_bytes);

// Elements of a bucket per rank: at most, for any places and such a size.
struct BucketNumel {
  std::int64_t static_numel = 0;
  std::int64_t dynamic_numel = 0;
};
BucketNumel most_bucket_numel(const CutModel& cut, std::int64_t bucket_bytes);
// Slots and staging of reductions: at most, as above. Grows with the size of buckets evenly.
std::int64_t most_reduction_bytes(const CutModel& cut, std::int64_t bucket_bytes);

optim::SubGroupPlan sub_groups(const CutModel& cut, const std::vector<ShardPlaces>& places,
                               std::int64_t sub_group_numel);

// Fills in ledger, step, staging of the groups, uses_nvme and full_gradient_bytes from the rest.
void complete(const CutModel& cut, std::int64_t num_micro_batches, Placement& placement);

}  // namespace tessera::planner
