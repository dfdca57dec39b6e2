// Internal to planner: how large the buffers of NVMe become for so many bytes.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/planner/memory_cost.h"

namespace tessera::planner {

// Room for a few requests; any tensor passes through in tiles.
inline constexpr std::int64_t kSmallestPoolBytes = std::int64_t{256} << 10;

// Sub-groups and the buffers that they are read into, updated in and written from.
//
// Four buffers (one is read, one updated, one written, one waits) of sub-groups as large as the
// bytes allow, up to 8 MiB of masters: larger requests make no disk faster. Where not even the
// smallest sub-groups, of 64 KiB, fit four times, there are fewer buffers.
//
// More of them give the disk work during backward (optim/cpu_pipeline.h), but a byte that keeps
// states in memory saves at least as much. So there are more only where memory is not short, or
// states were asked to be on NVMe: up to 1 GiB, or an eighth of what is there if that is less.
class OptimizerBuffers {
 public:
  struct Choice {
    std::int64_t sub_group_numel = 0;
    int num_buffers = 0;  // 0: nothing is on NVMe
    std::int64_t bytes = 0;
  };

  // `placements`: whatever may be on NVMe is; where less is, leases are at most as large.
  OptimizerBuffers(const CutModel& cut, const Placements& placements);

  Choice smallest() const;
  Choice largest() const;
  // REQUIRES: at least smallest().bytes.
  Choice choose(std::int64_t bytes) const;
  std::int64_t largest_numel() const { return largest_numel_; }

 private:
  struct Shard {
    std::int64_t numel = 0;
    Placement placement;
  };
  Choice make(std::int64_t sub_group_numel, int num_buffers) const;
  // With as many of the largest as there may be of so many bytes, and num_wanted_ at least.
  Choice make_deep(std::int64_t bytes) const;
  std::int64_t lease_bytes_of(const Shard& shard, std::int64_t numel) const;
  // Of any run of pieces with at most so many elements.
  std::int64_t most_lease_bytes(std::int64_t sub_group_numel) const;

  const CutModel& cut_;
  std::vector<Shard> shards_;  // those that the CPU updates, in order
  std::int64_t largest_numel_ = 0;
  std::int64_t smallest_numel_ = 0;
  std::int64_t deep_bytes_ = 0;  // of all buffers, where there may be more than num_wanted_
  int num_wanted_ = 0;
  bool is_given_ = false;
};

// Buffers that parameters on NVMe are read into.
class ParameterBuffers {
 public:
  ParameterBuffers(const CutModel& cut, const Placements& placements)
      : cut_(cut), placements_(placements) {}

  std::int64_t smallest() const;
  // A few units ahead, unless options say how much.
  std::int64_t largest() const;

 private:
  bool is_given() const {
    return cut_.options.parameter_buffers > 0 || cut_.options.parameter_buffer_bytes > 0;
  }
  std::int64_t bytes_of(std::size_t id) const;  // 0: not on NVMe

  const CutModel& cut_;
  const Placements& placements_;
};

// Buffers that gradients on NVMe pass through, at most, also from a discrete device. The smallest
// is kSmallestPoolBytes.
std::int64_t largest_gradient_pool(const CutModel& cut);

}  // namespace tessera::planner
