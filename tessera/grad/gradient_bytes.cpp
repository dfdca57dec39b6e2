#include "tessera/grad/gradient_bytes.h"

#include <algorithm>
#include <vector>

#include "tessera/device/host_memory.h"
#include "tessera/grad/reducer.h"
#include "tessera/shard/layout.h"

namespace tessera::grad {
namespace {

std::int64_t taken(std::int64_t numel, std::size_t element_bytes) {
  return static_cast<std::int64_t>(taken_bytes(static_cast<std::size_t>(numel) * element_bytes));
}

std::int64_t slot_bytes(std::int64_t shard_numel, int num_ranks, const ReducerOptions& options,
                        bool has_totals) {
  return static_cast<std::int64_t>(taken_bytes(
             bucket_buffer_bytes(shard_numel, num_ranks, options.wire_dtype, has_totals))) +
         static_cast<std::int64_t>(taken_bytes(partial_bytes(shard_numel, options))) +
         taken(shard_numel, bytes_of(options.wire_dtype));
}

}  // namespace

int num_sum_buffers(DType dtype) {
  return static_cast<int>(bytes_of(DType::kFloat32) / bytes_of(dtype));
}

int least_host_buffers(DType dtype, std::int64_t num_micro_batches) {
  return static_cast<int>(std::min<std::int64_t>(num_micro_batches, num_sum_buffers(dtype) + 1));
}

// One is filled while others are added up, and one more so that not every micro-batch is.
int good_host_buffers(DType dtype, std::int64_t num_micro_batches) {
  return static_cast<int>(std::min<std::int64_t>(num_micro_batches, num_sum_buffers(dtype) + 3));
}

std::int64_t host_addends_bytes(DType dtype, std::int64_t num_micro_batches) {
  return least_host_buffers(dtype, num_micro_batches) * static_cast<std::int64_t>(bytes_of(dtype));
}

std::size_t taken_bytes(std::size_t bytes) {
  if (bytes < device::kPagesFromBytes) {
    return bytes;
  }
  const std::size_t page = device::page_bytes();
  return (bytes + page - 1) / page * page;
}

std::size_t num_bucket_slots(const BucketSizes& sizes) {
  return static_cast<std::size_t>(std::min<std::int64_t>(2, sizes.num_buckets));
}

std::size_t num_dynamic_slots(const BucketSizes& sizes) {
  return sizes.largest_dynamic_numel > 0 ? 2 : 0;
}

std::size_t bucket_buffer_bytes(std::int64_t shard_numel, int num_ranks, DType wire,
                                bool has_totals) {
  const std::size_t on_wire = static_cast<std::size_t>(num_ranks) * bytes_of(wire);
  return static_cast<std::size_t>(shard_numel) *
         (has_totals ? std::max(on_wire, sizeof(float)) : on_wire);
}

std::size_t partial_bytes(std::int64_t shard_numel, const ReducerOptions& options) {
  return options.num_hosts == 1
             ? 0
             : static_cast<std::size_t>(shard_numel * options.num_hosts) * sizeof(float);
}

std::size_t quant_scratch_bytes(std::int64_t largest_numel, const ReducerOptions& options) {
  return options.blocks ? quant::wire_bytes(*options.blocks, largest_numel) : 0;
}

std::size_t quant_sums_bytes(std::size_t num_params) { return num_params * 2 * sizeof(double); }

std::int64_t num_norm_blocks(std::int64_t shard_numel) {
  return (shard_numel + kPieceStep - 1) / kPieceStep;
}

GradientBytes gradient_bytes(std::span<const GradientShape> params, int num_ranks,
                             const ReducerOptions& options, DType dtype,
                             const ReplicaSums& replicas) {
  const bool sends = num_ranks > 1 || replicas.num_replicas > 1;
  GradientBytes bytes;
  std::vector<BucketParam> trainable;
  std::int64_t num_blocks = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const GradientShape& param = params[i];
    if (!param.trainable) {
      continue;
    }
    const std::int64_t shard_numel = shard::Layout(param.numel, num_ranks, dtype).shard_numel();
    trainable.push_back({static_cast<int>(i), shard_numel, param.dynamic, param.home});
    if (param.home == Tier::kNvme) {
      num_blocks += num_norm_blocks(shard_numel);
    } else if (!sends && param.home == Tier::kDevice) {
      bytes.shards += taken(param.numel, sizeof(float));
    }
  }
  bytes.block_sums = taken(num_blocks, sizeof(double));
  if (sends) {
    const BucketSizes sizes = bucket_sizes(trainable, num_ranks, options.bucket_bytes,
                                           bytes_of(options.wire_dtype), options.block_numel());
    bytes.shards = taken(sizes.bucketed_numel, sizeof(float)) +
                   taken(sizes.region_numel - sizes.bucketed_numel, sizeof(float));
    bytes.quant_error =
        num_ranks > 1
            ? taken(static_cast<std::int64_t>(quant_scratch_bytes(
                        std::max(sizes.largest_shard_numel, sizes.largest_dynamic_numel), options)),
                    1)
            : 0;
    if (bytes.quant_error > 0) {
      const std::size_t page = device::page_bytes();
      const std::size_t sums = quant_sums_bytes(params.size());
      bytes.quant_sums = static_cast<std::int64_t>((sums + page - 1) / page * page);
    }
    bytes.slots =
        static_cast<std::int64_t>(num_bucket_slots(sizes)) *
            slot_bytes(sizes.largest_shard_numel, num_ranks, options, replicas.has_totals()) +
        static_cast<std::int64_t>(num_dynamic_slots(sizes)) *
            slot_bytes(sizes.largest_dynamic_numel, num_ranks, options,
                       replicas.has_dynamic_totals());
  }
  return bytes;
}

}  // namespace tessera::grad
