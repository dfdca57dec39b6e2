// Internal to planner: how large the buffers become that stored parameters are read into.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/planner/placement_cost.h"

namespace tessera::planner {

// Room for a few requests; any tensor passes through in tiles.
inline constexpr std::int64_t kSmallestPoolBytes = std::int64_t{256} << 10;

// Of a shard in memory, at least; of one on NVMe, exactly (with pages of one block).
std::int64_t parameter_weight(const shard::Layout& layout);
// The largest whole number of pages, and of blocks, in it.
std::int64_t whole_pages_below(std::int64_t bytes);

class ParameterBuffers {
 public:
  ParameterBuffers(const CutModel& cut, const std::vector<ShardPlaces>& stored)
      : cut_(cut), stored_(stored) {}

  std::int64_t smallest() const;
  // A few units ahead, unless options say how much.
  std::int64_t largest() const;
  std::int64_t largest_stored_unit() const;
  bool is_given() const {
    return cut_.options.parameter_buffers > 0 || cut_.options.parameter_buffer_bytes > 0;
  }

 private:
  const CutModel& cut_;
  const std::vector<ShardPlaces>& stored_;
};

}  // namespace tessera::planner
