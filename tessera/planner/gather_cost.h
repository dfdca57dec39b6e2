// Internal to planner: what gathers take: the arena they write to, and the staging of the groups
// that they pass through (Group::reserve_staging). Both grow together, so they are chosen together.
//
// There is the group of all gathers, and, where they go another way, one of secondary shards, and
// two of phases, through which all pass then but those to some ranks. In two phases what travels as
// wires lies in the arena in between, beside the parameter; so does what a secondary shard in host
// memory has of wires, while it is gathered.
//
// Staging holds any call of a step:
//   gathers of units, two of the one whose small parameters are the most; and a prefetch that joins
//   small uses before a unit. What is gathered at once is in the arena at once, and a pack is no
//   larger than its parameters there, so staging need not be larger than the arena for these;
//   a gather to some ranks, of a unit that is dynamic;
//   reductions of dynamic parameters, which use this group: two;
//   single numbers.
// More is taken only outside of steps, where parameters are gathered for other reasons than a use.
//
// Where calls pass through copies of their memory (comm::CallMemory::kCopied), what was said of
// small parameters holds for all. Nothing is staged in a group of one.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstdint>

#include "tessera/planner/memory_cost.h"

namespace tessera::planner {

// Whether a parameter with this placement is gathered into the arena: in a group of one, only from
// memory that operators do not read, or if it must be decoded.
bool is_gathered(const CutModel& cut, std::size_t id, const Placement& placement);
// In the arena, if it holds all that is gathered.
std::int64_t gathered_bytes(const CutModel& cut, const Placements& placements);

// Gathered bytes of one unit, as the arena takes them.
struct UnitBytes {
  std::size_t unit = 0;
  std::int64_t bytes = 0;
};
UnitBytes largest_unit(const CutModel& cut, const Placements& placements);
// As the coordinator makes it: room for `live_limit_bytes`, but for no more than all, and for the
// largest unit.
std::int64_t whole_arena_bytes(const CutModel& cut, const Placements& placements,
                               std::int64_t live_limit_bytes);

class GatherCost {
 public:
  // `bucket_bytes`: of reductions.
  GatherCost(const CutModel& cut, std::int64_t bucket_bytes);

  // What the groups reserve, with such an arena.
  void add_staging(std::int64_t arena_bytes, GroupStaging& to) const;
  std::int64_t staging_bytes(std::int64_t arena_bytes) const;
  // Arena and staging, as they are charged.
  std::int64_t bytes(std::int64_t arena_bytes) const;

  // The largest arena from `smallest` to `wanted`, or a page below it, that takes at most
  // `more_bytes` more than the smallest. REQUIRES: smallest <= wanted, 0 <= more_bytes.
  std::int64_t grown_arena(std::int64_t smallest, std::int64_t wanted,
                           std::int64_t more_bytes) const;

 private:
  struct Staged {                 // by a group
    std::int64_t least = 0;       // whatever the arena is
    std::int64_t of_gathers = 0;  // where the arena is as large
    std::int64_t bytes(std::int64_t arena_bytes) const;
  };
  std::int64_t of_numbers_ = 0;  // by the group of all ranks, if that is another
  Staged all_;
  Staged across_;
  Staged inside_;
  Staged secondary_;
};

}  // namespace tessera::planner
