#include "tessera/planner/gather_cost.h"

#include <algorithm>
#include <vector>

#include "tessera/comm/staging.h"
#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/device/arena_map.h"
#include "tessera/device/host_memory.h"

namespace tessera::planner {
namespace {

std::int64_t arena_bytes_of(const CutModel& cut, std::size_t id, const Placement& placement) {
  return is_gathered(cut, id, placement)
             ? as_int(device::round_to_arena(cut.layouts[id].gathered_bytes(placement.parameter)))
             : 0;
}

comm::GatherPiece piece_of(const shard::Layout& layout) {
  return {layout.shard_bytes(), layout.is_encoded()};
}

// By id: needed by a unit that some ranks may skip. Such a unit is known by a parameter that only
// it needs.
std::vector<bool> needed_by_dynamic(const CutModel& cut) {
  std::vector<bool> is_needed(cut.num_params());
  for (const std::vector<int>& unit : cut.model.units) {
    const bool is_dynamic = std::any_of(unit.begin(), unit.end(), [&](int id) {
      return cut.model.params[static_cast<std::size_t>(id)].dynamic;
    });
    for (const int id : unit) {
      is_needed[static_cast<std::size_t>(id)] =
          is_needed[static_cast<std::size_t>(id)] || is_dynamic;
    }
  }
  return is_needed;
}

}  // namespace

bool is_gathered(const CutModel& cut, std::size_t id, const Placement& placement) {
  return cut.options.num_ranks > 1 || placement.parameter != Tier::kDevice ||
         cut.layouts[id].is_encoded();
}

std::int64_t gathered_bytes(const CutModel& cut, const Placements& placements) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    bytes += arena_bytes_of(cut, i, placements[i]);
  }
  return bytes;
}

UnitBytes largest_unit(const CutModel& cut, const Placements& placements) {
  UnitBytes largest;
  for (std::size_t unit = 0; unit < cut.model.units.size(); ++unit) {
    std::int64_t bytes = 0;
    for (const int id : cut.model.units[unit]) {
      const auto i = static_cast<std::size_t>(id);
      bytes += arena_bytes_of(cut, i, placements[i]);
    }
    if (bytes > largest.bytes) {
      largest = {unit, bytes};
    }
  }
  return largest;
}

std::int64_t whole_arena_bytes(const CutModel& cut, const Placements& placements,
                               std::int64_t live_limit_bytes) {
  const std::int64_t all = gathered_bytes(cut, placements);
  std::int64_t held = all;
  if (live_limit_bytes < all) {
    std::int64_t rounding = 0;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      const std::int64_t bytes = arena_bytes_of(cut, i, placements[i]);
      rounding +=
          bytes > 0 ? bytes - as_int(cut.layouts[i].gathered_bytes(placements[i].parameter)) : 0;
    }
    held = std::min(live_limit_bytes + rounding, all);
  }
  return held + largest_unit(cut, placements).bytes;
}

GatherCost::GatherCost(const CutModel& cut, std::int64_t bucket_bytes)
    : is_staged_(cut.options.num_ranks > 1 &&
                 (cut.options.call_memory != comm::CallMemory::kShared ||
                  std::any_of(cut.layouts.begin(), cut.layouts.end(),
                              [](const shard::Layout& layout) { return layout.is_encoded(); }))) {
  if (!is_staged_) {
    return;
  }
  const int num_ranks = cut.options.num_ranks;
  const auto pack_below = static_cast<std::size_t>(cut.options.pack_below_bytes);
  const comm::CallMemory memory = cut.options.call_memory;
  const bool is_shared = memory == comm::CallMemory::kShared;
  const std::vector<bool> is_needed_by_dynamic = needed_by_dynamic(cut);
  std::int64_t largest_gather = 0;
  std::int64_t largest_gather_to = 0;
  // Of a unit. Small ones; beside those of others one alone is packed, too. All, if all are copied.
  std::int64_t most_staged = 0;
  for (const std::vector<int>& unit : cut.model.units) {
    std::vector<comm::GatherPiece> all;
    std::vector<comm::GatherPiece> by_dynamic;
    std::size_t staged = 0;
    for (const int id : unit) {
      const auto i = static_cast<std::size_t>(id);
      all.push_back(piece_of(cut.layouts[i]));
      if (is_needed_by_dynamic[i]) {
        by_dynamic.push_back(all.back());
      }
      const std::size_t pieces = all.back().wire_bytes * static_cast<std::size_t>(num_ranks);
      if (comm::is_staged_piece(all.back(), static_cast<std::size_t>(num_ranks), memory)) {
        staged += comm::staging_room(pieces);
      } else if (comm::is_small_piece(all.back().wire_bytes, pack_below) && !is_shared) {
        staged += pieces;
      }
    }
    most_staged = std::max(most_staged, as_int(comm::staging_room(staged)));
    largest_gather = std::max(
        largest_gather, as_int(comm::all_gather_staging_bytes(all, pack_below, num_ranks, memory)));
    // All ranks want it, over a network that needs copies: no case takes more.
    largest_gather_to =
        std::max(largest_gather_to,
                 as_int(comm::gather_to_staging_bytes(by_dynamic, pack_below,
                                                      {num_ranks, num_ranks, true, true, memory})));
  }
  std::vector<comm::GatherPiece> shards;
  for (const shard::Layout& layout : cut.layouts) {
    shards.push_back(piece_of(layout));
  }
  const std::int64_t everything =
      as_int(comm::all_gather_staging_bytes(shards, pack_below, num_ranks, memory));
  const std::int64_t dynamic_reduction =
      as_int(comm::reduce_scatter_staging_bytes(most_bucket_numel(cut, bucket_bytes).dynamic_numel,
                                                cut.options.wire_dtype, num_ranks, memory));
  least_ = std::max({largest_gather_to, 2 * dynamic_reduction, as_int(comm::kSmallAllReduceBytes)});
  // A use joins a call of less than merge_below_bytes.
  const std::int64_t joined = most_staged + as_int(comm::staging_room(static_cast<std::size_t>(
                                                coordinator::PlanBudgets().merge_below_bytes)));
  of_gathers_ = std::min(everything, std::max(2 * largest_gather, joined));
}

std::int64_t GatherCost::staging_bytes(std::int64_t arena_bytes) const {
  return is_staged_ ? taken_bytes(std::max(least_, std::min(of_gathers_, arena_bytes))) : 0;
}

std::int64_t GatherCost::bytes(std::int64_t arena_bytes) const {
  return taken_bytes(arena_bytes) + staging_bytes(arena_bytes);
}

std::int64_t GatherCost::grown_arena(std::int64_t smallest, std::int64_t wanted,
                                     std::int64_t more_bytes) const {
  const auto fits = [&](std::int64_t arena_bytes) {
    return bytes(arena_bytes) - bytes(smallest) <= more_bytes;
  };
  if (fits(wanted)) {
    return wanted;
  }
  const auto page = as_int(device::page_bytes());
  std::int64_t fitting = 0;  // pages more than the smallest
  std::int64_t too_many = (wanted - smallest) / page + 1;
  while (too_many - fitting > 1) {
    const std::int64_t middle = fitting + (too_many - fitting) / 2;
    (fits(smallest + middle * page) ? fitting : too_many) = middle;
  }
  return smallest + fitting * page;
}

}  // namespace tessera::planner
