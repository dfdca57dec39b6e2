// Internal to planner: how large sub-groups and their buffers become for so many bytes.
//
// Four buffers (one is read, one updated, one written, one waits) of sub-groups as large as the
// bytes allow, up to 8 MiB of masters: larger requests make no disk faster. Where not even the
// smallest sub-groups, of 64 KiB, fit four times, there are fewer buffers.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/planner/placement_cost.h"

namespace tessera::planner {

class OptimizerBuffers {
 public:
  struct Choice {
    std::int64_t sub_group_numel = 0;
    int num_buffers = 0;  // 0: nothing is stored
    std::int64_t bytes = 0;
  };

  // `stored`: whatever may be on NVMe is; where less is, leases are at most as large.
  OptimizerBuffers(const CutModel& cut, const std::vector<ShardPlaces>& stored);

  Choice smallest() const;
  Choice largest() const;
  // REQUIRES: at least smallest().bytes.
  Choice choose(std::int64_t bytes) const;
  std::int64_t largest_numel() const { return largest_numel_; }

 private:
  struct Shard {
    std::int64_t numel = 0;
    bool parameter_stored = false;
    bool gradient_stored = false;
    bool states_stored = false;
  };
  Choice make(std::int64_t sub_group_numel, int num_buffers) const;
  std::int64_t lease_bytes_of(const Shard& shard, std::int64_t numel) const;
  // Of any run of pieces with at most so many elements.
  std::int64_t most_lease_bytes(std::int64_t sub_group_numel) const;

  const CutModel& cut_;
  std::vector<Shard> shards_;  // trainable ones, in order
  std::int64_t largest_numel_ = 0;
  std::int64_t smallest_numel_ = 0;
  int num_wanted_ = 0;
  bool is_given_ = false;
};

}  // namespace tessera::planner
