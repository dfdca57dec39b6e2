// What a Reducer takes, before it exists: exact, as the ledger will be charged on a device whose
// memory is the host's. Pure; for a planner that knows shapes only.
//
// It holds for a reducer whose memory is planned, which takes it at once. Otherwise memory is taken
// when first needed, and these are bounds.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/core/dtype.h"
#include "tessera/grad/bucket.h"

namespace tessera::grad {

struct ReducerOptions;

struct GradientShape {
  std::int64_t numel = 0;  // of the full parameter
  bool trainable = true;
  bool dynamic = false;
  Tier home = Tier::kDevice;  // of its gradient
};

struct GradientBytes {
  // Of Role::kGradient, in memory of the device. Of a rank that sends nothing, `shards` are there
  // from a parameter's first gradient on (fp32: until clear()), since autograd's own memory is
  // adopted.
  std::int64_t shards = 0;       // of gradients in memory
  std::int64_t slots = 0;        // buckets on the wire, their results, and those of first hops
  std::int64_t quant_error = 0;  // one piece as it is quantised, to measure what that changes
  // Of Role::kGradient, in memory of the host.
  std::int64_t block_sums = 0;
  // Of Role::kOther, pinned: what quant_error measures.
  std::int64_t quant_sums = 0;

  // Of Role::kGradient.
  std::int64_t total() const { return shards + slots + quant_error + block_sums; }
};

// What is summed over the ranks that hold the same shard (ReducerParts::replicas).
struct ReplicaSums {
  int num_replicas = 1;
  int num_micro_batches = 0;  // as ReducerParts'

  // In fp32, of micro-batches that were added up before: of static and of dynamic parameters.
  bool has_totals() const { return num_replicas > 1 && num_micro_batches != 1; }
  bool has_dynamic_totals() const { return num_replicas > 1; }
};

// `params`: by id, in the order of registration. `num_ranks`: over which they are cut. `dtype`: of
// parameters and their gradients.
GradientBytes gradient_bytes(std::span<const GradientShape> params, int num_ranks,
                             const ReducerOptions& options, DType dtype,
                             const ReplicaSums& replicas = {});

// What an allocation of `bytes` is charged (device/host_memory.h).
std::size_t taken_bytes(std::size_t bytes);
// Slots that a reducer that sends takes for its buckets, and for those of dynamic parameters.
std::size_t num_bucket_slots(const BucketSizes& sizes);
std::size_t num_dynamic_slots(const BucketSizes& sizes);
// Of the buffer of a slot: parts for all ranks, in the wire's type; where there are totals they
// take its place once it has been reduced.
std::size_t bucket_buffer_bytes(std::int64_t shard_numel, int num_ranks, DType wire,
                                bool has_totals);
// Of the result of a reduction's first hop; 0: there is one hop.
std::size_t partial_bytes(std::int64_t shard_numel, const ReducerOptions& options);
// A rank's part of the largest bucket, quantised; 0: nothing is.
std::size_t quant_scratch_bytes(std::int64_t largest_numel, const ReducerOptions& options);
// Of the sums that tell the error of all parameters: two numbers each.
std::size_t quant_sums_bytes(std::size_t num_params);
// Of a shard's gradients in memory of the host (host_copies.h): buffers of this type whose place a
// sum in fp32 takes; buffers for so many micro-batches, with which they can be added up as they
// come, and with which nothing waits for that; and what a reader of the gradient then reads, per
// element.
int num_sum_buffers(DType dtype);
int least_host_buffers(DType dtype, std::int64_t num_micro_batches);
int good_host_buffers(DType dtype, std::int64_t num_micro_batches);
std::int64_t host_addends_bytes(DType dtype, std::int64_t num_micro_batches);
// Of one shard on NVMe.
std::int64_t num_norm_blocks(std::int64_t shard_numel);

}  // namespace tessera::grad
