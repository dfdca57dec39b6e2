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

std::int64_t capacity_of(int num_ranks, std::int64_t bucket_bytes,
                         std::size_t wire_bytes_per_element, std::int64_t block_numel) {
  TESSERA_INVARIANT(num_ranks >= 1 && bucket_bytes >= 0 && wire_bytes_per_element >= 1 &&
                        block_numel >= 1 && kPieceStep % block_numel == 0,
                    "buckets of ", bucket_bytes, " bytes for ", num_ranks, " ranks, elements of ",
                    wire_bytes_per_element, ", blocks of ", block_numel);
  return std::max<std::int64_t>(
             1, bucket_bytes /
                    (static_cast<std::int64_t>(wire_bytes_per_element) * num_ranks * block_numel)) *
         block_numel;
}

// What becomes of static parameters that have elements, as gradients are added. alone(num_added,
// param, most): it travels alone, in buckets of at most `most` each. shared(num_added, param,
// begins): with others, in a bucket that begins with it or in the one of the call before.
template <typename Alone, typename Shared>
void for_each_static(std::span<const BucketParam> params, std::int64_t capacity,
                     std::int64_t block_numel, const Alone& alone, const Shared& shared) {
  std::int64_t filled = 0;
  for (std::size_t num_added = 1; num_added <= params.size(); ++num_added) {
    const BucketParam& param = params[params.size() - num_added];
    TESSERA_INVARIANT(param.id >= 0 && param.shard_numel >= 0, "parameter ", param.id, " with ",
                      param.shard_numel, " elements per rank");
    if (param.dynamic || param.shard_numel == 0) {
      continue;
    }
    const std::int64_t shard_numel = in_blocks(param.shard_numel, block_numel);
    if (travels_alone(shard_numel, capacity)) {
      alone(num_added, param, most_in_bucket(param, capacity));
    } else {
      const bool begins = filled == 0 || filled > capacity - shard_numel;
      filled = (begins ? 0 : filled) + shard_numel;
      shared(num_added, param, begins);
    }
  }
}

void add_static(BucketSizes& sizes, std::span<const BucketParam> params, std::int64_t capacity,
                std::int64_t block_numel) {
  std::int64_t filled = 0;
  const auto add = [&](const BucketParam& param, std::int64_t num_buckets, std::int64_t largest) {
    sizes.num_buckets += num_buckets;
    sizes.largest_shard_numel = std::max(sizes.largest_shard_numel, largest);
    if (param.home == Tier::kDevice) {
      sizes.bucketed_numel += in_blocks(param.shard_numel, block_numel);
    }
  };
  for_each_static(
      params, capacity, block_numel,
      [&](std::size_t, const BucketParam& param, std::int64_t most) {
        add(param, (param.shard_numel + most - 1) / most,
            in_blocks(std::min(most, param.shard_numel), block_numel));
      },
      [&](std::size_t, const BucketParam& param, bool begins) {
        filled = (begins ? 0 : filled) + in_blocks(param.shard_numel, block_numel);
        add(param, begins ? 1 : 0, filled);
      });
  sizes.region_numel = sizes.bucketed_numel;
}

void add_dynamic(BucketSizes& sizes, std::span<const BucketParam> params, std::int64_t capacity,
                 std::int64_t block_numel) {
  std::int64_t shared_numel = 0;
  for (std::size_t i = params.size(); i-- > 0;) {
    const BucketParam& param = params[i];
    if (!param.dynamic) {
      continue;
    }
    const std::int64_t shard_numel = in_blocks(param.shard_numel, block_numel);
    if (param.home == Tier::kDevice) {
      sizes.region_numel += shard_numel;
    }
    std::int64_t numel = std::min(most_in_bucket(param, capacity), shard_numel);
    if (!travels_alone(shard_numel, capacity)) {
      shared_numel = std::min(capacity, shared_numel + shard_numel);
      numel = shared_numel;
    }
    sizes.largest_dynamic_numel = std::max(sizes.largest_dynamic_numel, numel);
  }
}

std::vector<Bucket> make_buckets(std::span<const BucketParam> params, std::int64_t capacity,
                                 std::int64_t block_numel) {
  // With each bucket, how many gradients were added once its last one was.
  std::vector<std::pair<std::size_t, Bucket>> planned;
  Bucket shared;
  std::size_t shared_full_after = 0;
  const auto end_shared = [&] {
    if (!shared.pieces.empty()) {
      planned.emplace_back(shared_full_after, std::exchange(shared, {}));
    }
  };
  for_each_static(
      params, capacity, block_numel,
      [&](std::size_t num_added, const BucketParam& param, std::int64_t most) {
        for (std::int64_t begin = 0; begin < param.shard_numel; begin += most) {
          const std::int64_t numel = std::min(most, param.shard_numel - begin);
          const std::int64_t padding = in_blocks(numel, block_numel) - numel;
          planned.push_back(
              {num_added, {{{param.id, begin, numel, 0, padding}}, numel + padding, 0}});
        }
      },
      [&](std::size_t num_added, const BucketParam& param, bool begins) {
        if (begins) {
          end_shared();
        }
        const std::int64_t shard_numel = in_blocks(param.shard_numel, block_numel);
        shared.pieces.push_back(
            {param.id, 0, param.shard_numel, shared.shard_numel, shard_numel - param.shard_numel});
        shared.shard_numel += shard_numel;
        shared_full_after = num_added;
      });
  end_shared();
  // Stable: the buckets of one large parameter stay behind each other.
  std::stable_sort(planned.begin(), planned.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Bucket> buckets;
  buckets.reserve(planned.size());
  for (auto& entry : planned) {
    buckets.push_back(std::move(entry.second));
  }
  return buckets;
}

// Gives buckets their offsets in the region, in their order; behind them are dynamic parameters.
void assign_region(BucketLayout& layout, std::span<const BucketParam> params,
                   std::int64_t block_numel) {
  std::int64_t end = 0;
  for (Bucket& bucket : layout.buckets) {
    bucket.region_offset = end;
    for (const Piece& piece : bucket.pieces) {
      const auto id = static_cast<std::size_t>(piece.param);
      if (layout.home[id] != Tier::kDevice) {
        continue;
      }
      if (piece.shard_begin == 0) {
        layout.region_offset[id] = end;
      }
      end += piece.numel + piece.padding;
    }
  }
  for (std::size_t i = params.size(); i-- > 0;) {
    const BucketParam& param = params[i];
    if (param.dynamic && param.home == Tier::kDevice) {
      layout.region_offset[static_cast<std::size_t>(param.id)] = end;
      end += in_blocks(param.shard_numel, block_numel);
    }
  }
  TESSERA_INVARIANT(end == layout.region_numel, "gradients take ", end, " elements, not ",
                    layout.region_numel);
}

}  // namespace

BucketLayout plan_buckets(std::span<const BucketParam> params, int num_ranks,
                          std::int64_t bucket_bytes, std::size_t wire_bytes_per_element,
                          std::int64_t block_numel) {
  BucketLayout layout;
  static_cast<BucketSizes&>(layout) =
      bucket_sizes(params, num_ranks, bucket_bytes, wire_bytes_per_element, block_numel);
  for (const BucketParam& param : params) {
    const auto id = static_cast<std::size_t>(param.id);
    if (layout.region_offset.size() <= id) {
      layout.region_offset.resize(id + 1, -1);
      layout.is_dynamic.resize(id + 1, false);
      layout.home.resize(id + 1);
    }
    layout.home[id] = param.home;
    layout.is_dynamic[id] = param.dynamic;
    if (!param.dynamic && param.shard_numel == 0 && param.home == Tier::kDevice) {
      layout.region_offset[id] = 0;
    }
  }
  layout.buckets = make_buckets(
      params, capacity_of(num_ranks, bucket_bytes, wire_bytes_per_element, block_numel),
      block_numel);
  assign_region(layout, params, block_numel);
  return layout;
}

BucketSizes bucket_sizes(std::span<const BucketParam> params, int num_ranks,
                         std::int64_t bucket_bytes, std::size_t wire_bytes_per_element,
                         std::int64_t block_numel) {
  const std::int64_t capacity =
      capacity_of(num_ranks, bucket_bytes, wire_bytes_per_element, block_numel);
  BucketSizes sizes;
  add_static(sizes, params, capacity, block_numel);
  add_dynamic(sizes, params, capacity, block_numel);
  return sizes;
}

}  // namespace tessera::grad
