// What the CPU pipeline works on at a time: sub-groups, runs of pieces of parameters. Pure: the
// planner asks for the sizes before anything exists, the optimizer works by the plan.
//
//   pieces    | p0 | p1 | p2 [0, S) | p2 [S, 2S) | p2 [2S, end) p3 p4 | ...      S: sub_group_numel
//
//   states    |master|state 0|state 1|master|state 0|state 1| ...     on NVMe
//             |<------ a piece ----->|<------ a piece ----->|
//
//   lease     | states as on NVMe    |parameter|parameter|..|gradient|gradient|..|
//
// Invariants:
//  (1) A sub-group has at most sub_group_numel elements, of parameters that follow each other and
//      of which the same parts are on NVMe. A shard with more is cut at multiples of
//      sub_group_numel; so pieces depend on nothing but their own shard.
//  (2) The states of a sub-group on NVMe are one range: one read brings them, one write takes them
//      back. Every tensor of a piece has whole blocks of its own.
//  (3) A lease holds only what is on NVMe; what is in memory is worked on in place. A sub-group
//      without anything on NVMe has no lease.
//
// Only fp32 parameters are their own masters; others have one among their states.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/core/placement.h"

namespace tessera::optim {

struct SubGroupParam {
  std::int64_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  bool trainable = true;
  Placement placement = {};
  // Where its states are on NVMe; -1: behind those of the parameter before it, which is where they
  // are put at first. REQUIRES: a multiple of kBlockBytes.
  std::int64_t states_offset = -1;
};

struct SubGroupPiece {
  int param = 0;
  std::int64_t begin = 0;           // in the shard; a multiple of shard::kShardStep
  std::int64_t numel = 0;           // with padding
  std::size_t tensor_bytes = 0;     // of each fp32 tensor: whole blocks
  std::size_t parameter_bytes = 0;  // of the parameter: whole blocks
  std::uint64_t states_offset = 0;  // on NVMe; not used in memory
  // Offsets in the lease, of what is on NVMe.
  std::size_t states_in_lease = 0;
  std::size_t parameter_in_lease = 0;
  std::size_t gradient_in_lease = 0;
};

struct SubGroup {
  std::vector<SubGroupPiece> pieces;
  std::int64_t numel = 0;
  Placement placement;  // of its first parameter
  // Of all pieces; 0 where they are in memory.
  std::uint64_t states_offset = 0;
  std::size_t states_bytes = 0;
  std::size_t lease_bytes = 0;

  bool parameters_on_nvme() const { return placement.parameter == Tier::kNvme; }
  bool gradients_on_nvme() const { return placement.gradient == Tier::kNvme; }
  bool states_on_nvme() const { return placement.states == Tier::kNvme; }
};

struct SubGroupPlan {
  std::vector<SubGroup> groups;           // of trainable parameters, in the order of updates
  std::vector<std::size_t> states_bytes;  // by id, of trainable ones: wherever they live
  std::size_t nvme_states_bytes = 0;      // of trainable ones
  std::size_t max_lease_bytes = 0;        // 0: nothing is on NVMe
  // Of one update.
  std::size_t states_read_bytes = 0;
  std::size_t states_written_bytes = 0;
  std::size_t parameters_read_bytes = 0;
  std::size_t parameters_written_bytes = 0;
};

// Elements: tensors of states that stream to a device are aligned to this (device_executor.h).
inline constexpr std::int64_t kStreamedStep = 64;

inline bool is_own_master(DType dtype) { return dtype == DType::kFloat32; }
// Masters and states, in fp32.
inline std::size_t num_state_tensors(DType dtype, int num_states) {
  return static_cast<std::size_t>(num_states) + (is_own_master(dtype) ? 0 : 1);
}

// `params` by id. Throws ConfigError unless sub_group_numel is a positive multiple of
// shard::kShardStep.
SubGroupPlan plan_sub_groups(const std::vector<SubGroupParam>& params, std::int64_t sub_group_numel,
                             int num_states);

// How many sub-groups, from the first one on, stay in `buffer_bytes` of leases from one update to
// the next, so that they are not read again: all if all fit, else what is left beside leases for
// the others. Those are three at least, of which one is read, one updated and one written at a
// time, and else half of the buffers: what lies in them while the model computes is written and
// followed by other states, twice the bytes that a lease saves which is kept.
std::size_t num_kept_groups(const SubGroupPlan& plan, std::size_t buffer_bytes);

}  // namespace tessera::optim
