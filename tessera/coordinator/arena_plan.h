// Where in the arena each gather goes, when all lifetimes are known. Pure.
//
// Gathers that begin and end together lie together. The first try places them in the order of
// time, best fit, as the arena itself would; where that leaves one without a place, the second try
// places the largest first, each at the lowest offset that is free for its whole life.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::coordinator {

// [begin, end) on any clock that orders what happens.
struct Lifetime {
  std::int64_t bytes = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct ArenaPlan {
  std::vector<std::int64_t> offsets;  // one per lifetime; -1: no bytes, or no place
  std::int64_t height = 0;            // bytes of the arena that are used
  std::int64_t num_unplaced = 0;
};

// Offsets are multiples of the arena's alignment.
ArenaPlan assign_offsets(std::span<const Lifetime> lifetimes, std::int64_t capacity_bytes);

}  // namespace tessera::coordinator
