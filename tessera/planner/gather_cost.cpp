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

// In the arena beside a parameter, while its wires are between two phases, or have been copied from
// a secondary shard in host memory.
std::int64_t scratch_bytes(const CutModel& cut, std::size_t id, bool is_secondary_in_host) {
  const comm::GatherPiece piece = piece_of(cut, id);
  if (!piece.is_encoded) {
    return 0;
  }
  const int hosts = cut.options.num_gather_hosts;
  const std::size_t between = hosts > 1 ? piece.wire_bytes * static_cast<std::size_t>(hosts) : 0;
  const std::int64_t copied = is_secondary_in_host ? secondary_shard_bytes(cut, id) : 0;
  return as_int(device::round_to_arena(std::max(between, static_cast<std::size_t>(copied))));
}

// Of gathers of such pieces, by id, in a group of so many ranks.
std::int64_t staging_of(const CutModel& cut, const std::vector<comm::GatherPiece>& pieces,
                        int num_ranks) {
  const auto pack_below = static_cast<std::size_t>(cut.options.pack_below_bytes);
  const comm::CallMemory memory = cut.options.call_memory;
  std::int64_t largest_gather = 0;
  // Of a unit. Small ones; beside those of others one alone is packed, too. All, if all are copied.
  std::int64_t most_staged = 0;
  for (const std::vector<int>& unit : cut.model.units) {
    std::vector<comm::GatherPiece> all;
    std::size_t staged = 0;
    for (const int id : unit) {
      all.push_back(pieces[static_cast<std::size_t>(id)]);
      const std::size_t bytes = all.back().wire_bytes * static_cast<std::size_t>(num_ranks);
      if (comm::is_staged_piece(all.back(), static_cast<std::size_t>(num_ranks), memory)) {
        staged += comm::staging_room(bytes);
      } else if (comm::is_small_piece(all.back().wire_bytes, pack_below) &&
                 memory != comm::CallMemory::kShared) {
        staged += bytes;
      }
    }
    most_staged = std::max(most_staged, as_int(comm::staging_room(staged)));
    largest_gather = std::max(
        largest_gather, as_int(comm::all_gather_staging_bytes(all, pack_below, num_ranks, memory)));
  }
  const std::int64_t everything =
      as_int(comm::all_gather_staging_bytes(pieces, pack_below, num_ranks, memory));
  // A use joins a call of less than merge_below_bytes.
  const std::int64_t joined = most_staged + as_int(comm::staging_room(static_cast<std::size_t>(
                                                coordinator::PlanBudgets().merge_below_bytes)));
  return std::min(everything, std::max(2 * largest_gather, joined));
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
      // As if its secondary shard were in host memory: one that leaves the device makes room there.
      bytes +=
          arena_bytes_of(cut, i, placements[i]) + scratch_bytes(cut, i, cut.options.is_discrete);
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
  // Whatever is gathered at once may have scratch.
  std::int64_t between = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    between += scratch_bytes(cut, i, placements[i].secondary == Tier::kHost);
  }
  return held + std::min(between, held) + largest_unit(cut, placements).bytes;
}

GatherCost::GatherCost(const CutModel& cut, std::int64_t bucket_bytes) {
  const int num_ranks = cut.options.num_ranks;
  if (num_ranks == 1) {
    return;
  }
  const comm::CallMemory memory = cut.options.call_memory;
  std::vector<comm::GatherPiece> pieces;
  for (std::size_t id = 0; id < cut.num_params(); ++id) {
    pieces.push_back(piece_of(cut, id));
  }
  const int hosts = cut.options.num_gather_hosts;
  if (hosts == 1) {
    all_.of_gathers = staging_of(cut, pieces, num_ranks);
  } else {
    std::vector<comm::GatherPiece> blocks = pieces;  // wires are bytes as others, so far
    for (comm::GatherPiece& block : blocks) {
      block.is_encoded = false;
    }
    across_.of_gathers = staging_of(cut, blocks, hosts);
    blocks = pieces;
    for (comm::GatherPiece& block : blocks) {
      block.wire_bytes *= static_cast<std::size_t>(hosts);
    }
    inside_.of_gathers = staging_of(cut, blocks, num_ranks / hosts);
  }
  if (cut.options.num_secondary_ranks > 1) {
    std::vector<comm::GatherPiece> second;
    for (std::size_t id = 0; id < cut.num_params(); ++id) {
      second.push_back(
          {static_cast<std::size_t>(secondary_shard_bytes(cut, id)), piece_of(cut, id).is_encoded});
    }
    secondary_.of_gathers = staging_of(cut, second, cut.options.num_secondary_ranks);
  }

  const std::vector<bool> is_needed_by_dynamic = needed_by_dynamic(cut);
  for (const std::vector<int>& unit : cut.model.units) {
    std::vector<comm::GatherPiece> by_dynamic;
    for (const int id : unit) {
      if (is_needed_by_dynamic[static_cast<std::size_t>(id)]) {
        by_dynamic.push_back(pieces[static_cast<std::size_t>(id)]);
      }
    }
    // All ranks want it, over a network that needs copies: no case takes more.
    all_.least =
        std::max(all_.least, as_int(comm::gather_to_staging_bytes(
                                 by_dynamic, static_cast<std::size_t>(cut.options.pack_below_bytes),
                                 {num_ranks, num_ranks, true, true, memory})));
  }
  if (!has_agreed_groups(cut.options)) {
    all_.least = std::max(
        all_.least,
        2 * reduction_staging(most_bucket_numel(cut, bucket_bytes).dynamic_numel, cut.options));
  }
  if (memory != comm::CallMemory::kShared || all_.least > 0 || all_.of_gathers > 0) {
    all_.least = std::max(all_.least, as_int(comm::kSmallAllReduceBytes));
    const bool is_apart = has_agreed_groups(cut.options) || cut.options.num_copies > 1;
    of_numbers_ = is_apart ? region_bytes(as_int(comm::kSmallAllReduceBytes)) : 0;
  }
}

std::int64_t GatherCost::Staged::bytes(std::int64_t arena_bytes) const {
  return region_bytes(std::max(least, std::min(of_gathers, arena_bytes)));
}

void GatherCost::add_staging(std::int64_t arena_bytes, GroupStaging& to) const {
  to.all += of_numbers_;
  to.gathers += all_.bytes(arena_bytes);
  to.phase_across += across_.bytes(arena_bytes);
  to.phase_inside += inside_.bytes(arena_bytes);
  to.secondary += secondary_.bytes(arena_bytes);
}

std::int64_t GatherCost::staging_bytes(std::int64_t arena_bytes) const {
  GroupStaging staging;
  add_staging(arena_bytes, staging);
  return staging.total();
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
