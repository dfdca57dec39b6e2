// Memory of a Reducer, before it exists: exact, as the ledger will be charged on a device whose
// memory is the host's. Pure; for a planner that knows shapes only.
//
// Exact for a reducer with ReducerParts::is_planned, which allocates at construction. Otherwise
// memory is allocated when first needed, and these are upper bounds.
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
  std::int64_t numel = 0;  // elements of the full parameter
  bool trainable = true;
  bool dynamic = false;
  Tier home = Tier::kDevice;  // tier of its gradient
};

struct GradientBytes {
  // Role::kGradient, in device memory. On a rank that sends nothing, `shards` are charged from a
  // parameter's first gradient on (fp32: until clear()), because autograd's memory is adopted.
  std::int64_t shards = 0;       // of gradients in memory
  std::int64_t slots = 0;        // buckets on the wire, their results, and those of first hops
  std::int64_t quant_error = 0;  // scratch for one quantised piece, to measure the error
  // Role::kGradient, in host memory.
  std::int64_t block_sums = 0;
  // Role::kOther, pinned: the sums that quant_error measures.
  std::int64_t quant_sums = 0;

  // All of Role::kGradient.
  std::int64_t total() const { return shards + slots + quant_error + block_sums; }
};

// Sums over the ranks that hold the same shard (ReducerParts::replicas).
struct ReplicaSums {
  int num_replicas = 1;
  int num_micro_batches = 0;  // as ReducerParts'

  // True if accumulated gradients are summed over replicas in fp32: of static and of dynamic
  // parameters.
  bool has_totals() const { return num_replicas > 1 && num_micro_batches != 1; }
  bool has_dynamic_totals() const { return num_replicas > 1; }
};

// `params`: by id, in the order of registration. `num_ranks`: ranks over which they are cut.
// `dtype`: type of parameters and gradients.
GradientBytes gradient_bytes(std::span<const GradientShape> params, int num_ranks,
                             const ReducerOptions& options, DType dtype,
                             const ReplicaSums& replicas = {});

// Bytes charged for an allocation of `bytes` (device/host_memory.h).
std::size_t taken_bytes(std::size_t bytes);
// Slots of a reducer that sends: for buckets, and for buckets of dynamic parameters.
std::size_t num_bucket_slots(const BucketSizes& sizes);
std::size_t num_dynamic_slots(const BucketSizes& sizes);
// Bytes of a slot's buffer: parts for all ranks, in the wire type; fp32 totals, if there are any,
// use it after the reduction.
std::size_t bucket_buffer_bytes(std::int64_t shard_numel, int num_ranks, DType wire,
                                bool has_totals);
// Bytes of the first hop's result; 0 with one hop.
std::size_t partial_bytes(std::int64_t shard_numel, const ReducerOptions& options);
// Bytes of a rank's part of the largest bucket, quantised; 0 if nothing is quantised.
std::size_t quant_scratch_bytes(std::int64_t largest_numel, const ReducerOptions& options);
// Bytes of the sums that measure the error of all parameters: two numbers each.
std::size_t quant_sums_bytes(std::size_t num_params);
// For a shard's gradients in host memory (host_copies.h): the buffers of this type that an fp32 sum
// occupies; the fewest buffers with which this many micro-batches can be added up; the number with
// which nothing waits for a sum; and the bytes per element that a reader of the gradient reads.
int num_sum_buffers(DType dtype);
int least_host_buffers(DType dtype, std::int64_t num_micro_batches);
int good_host_buffers(DType dtype, std::int64_t num_micro_batches);
std::int64_t host_addends_bytes(DType dtype, std::int64_t num_micro_batches);
// Blocks of one shard on NVMe for which sums of squares are kept.
std::int64_t num_norm_blocks(std::int64_t shard_numel);

}  // namespace tessera::grad
