#include "tessera/grad/bucket.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::grad {
namespace {

std::int64_t in_blocks(std::int64_t numel, std::int64_t block_numel) {
  return (numel + block_numel - 1) / block_numel * block_numel;
}

// `numel`: of its shard, in whole blocks.
bool travels_alone(std::int64_t numel, std::int64_t capacity) { return numel >= capacity - numel; }

// How much of a parameter that travels alone is in one bucket.
std::int64_t most_in_bucket(const BucketParam& param, std::int64_t capacity) {
  if (capacity >= kPieceStep) {
    return capacity / kPieceStep * kPieceStep;
  }
  return param.home == Tier::kNvme ? kPieceStep : capacity;
}

// Gives buckets their offsets in the region, in their order.
void assign_region(BucketLayout& layout) {
  for (Bucket& bucket : layout.buckets) {
    bucket.region_offset = layout.region_numel;
    layout.largest_shard_numel = std::max(layout.largest_shard_numel, bucket.shard_numel);
    for (const Piece& piece : bucket.pieces) {
      const auto id = static_cast<std::size_t>(piece.param);
      if (layout.home[id] != Tier::kDevice) {
        continue;
      }
      if (piece.shard_begin == 0) {
        layout.region_offset[id] = layout.region_numel;
      }
      layout.region_numel += piece.numel + piece.padding;
    }
  }
  layout.bucketed_numel = layout.region_numel;
}

// Gives dynamic parameters their offsets behind the buckets.
void assign_dynamic(BucketLayout& layout, std::span<const BucketParam> params,
                    std::int64_t capacity, std::int64_t block_numel) {
  std::int64_t shared_numel = 0;
  for (std::size_t i = params.size(); i-- > 0;) {
    const BucketParam& param = params[i];
    if (!param.dynamic) {
      continue;
    }
    const std::int64_t shard_numel = in_blocks(param.shard_numel, block_numel);
    layout.is_dynamic[static_cast<std::size_t>(param.id)] = true;
    if (param.home == Tier::kDevice) {
      layout.region_offset[static_cast<std::size_t>(param.id)] = layout.region_numel;
      layout.region_numel += shard_numel;
    }
    std::int64_t numel = std::min(most_in_bucket(param, capacity), shard_numel);
    if (!travels_alone(shard_numel, capacity)) {
      shared_numel = std::min(capacity, shared_numel + shard_numel);
      numel = shared_numel;
    }
    layout.largest_dynamic_numel = std::max(layout.largest_dynamic_numel, numel);
  }
}

}  // namespace

BucketLayout plan_buckets(std::span<const BucketParam> params, int num_ranks,
                          std::int64_t bucket_bytes, std::size_t wire_bytes_per_element,
                          std::int64_t block_numel) {
  TESSERA_INVARIANT(num_ranks >= 1 && bucket_bytes >= 0 && wire_bytes_per_element >= 1 &&
                        block_numel >= 1 && kPieceStep % block_numel == 0,
                    "buckets of ", bucket_bytes, " bytes for ", num_ranks, " ranks, elements of ",
                    wire_bytes_per_element, ", blocks of ", block_numel);
  const std::int64_t capacity =
      std::max<std::int64_t>(1, bucket_bytes / (static_cast<std::int64_t>(wire_bytes_per_element) *
                                                num_ranks * block_numel)) *
      block_numel;
  // With each bucket, how many gradients were added once its last one was.
  std::vector<std::pair<std::size_t, Bucket>> planned;
  Bucket shared;
  std::size_t shared_full_after = 0;
  BucketLayout layout;
  for (std::size_t num_added = 1; num_added <= params.size(); ++num_added) {
    const BucketParam& param = params[params.size() - num_added];
    TESSERA_INVARIANT(param.id >= 0 && param.shard_numel >= 0, "parameter ", param.id, " with ",
                      param.shard_numel, " elements per rank");
    const auto id = static_cast<std::size_t>(param.id);
    if (layout.region_offset.size() <= id) {
      layout.region_offset.resize(id + 1, -1);
      layout.is_dynamic.resize(id + 1, false);
      layout.home.resize(id + 1);
    }
    layout.home[id] = param.home;
    if (param.dynamic) {
      continue;
    }
    const std::int64_t shard_numel = in_blocks(param.shard_numel, block_numel);
    if (param.shard_numel == 0) {
      layout.region_offset[id] = param.home == Tier::kDevice ? 0 : -1;
    } else if (travels_alone(shard_numel, capacity)) {
      const std::int64_t most = most_in_bucket(param, capacity);
      for (std::int64_t begin = 0; begin < param.shard_numel; begin += most) {
        const std::int64_t numel = std::min(most, param.shard_numel - begin);
        const std::int64_t padding = in_blocks(numel, block_numel) - numel;
        planned.push_back(
            {num_added, {{{param.id, begin, numel, 0, padding}}, numel + padding, 0}});
      }
    } else {
      if (shared.shard_numel > capacity - shard_numel) {
        planned.emplace_back(shared_full_after, std::exchange(shared, {}));
      }
      shared.pieces.push_back(
          {param.id, 0, param.shard_numel, shared.shard_numel, shard_numel - param.shard_numel});
      shared.shard_numel += shard_numel;
      shared_full_after = num_added;
    }
  }
  if (!shared.pieces.empty()) {
    planned.emplace_back(shared_full_after, std::move(shared));
  }
  // Stable: the buckets of one large parameter stay behind each other.
  std::stable_sort(planned.begin(), planned.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& entry : planned) {
    layout.buckets.push_back(std::move(entry.second));
  }
  assign_region(layout);
  assign_dynamic(layout, params, capacity, block_numel);
  return layout;
}

}  // namespace tessera::grad
