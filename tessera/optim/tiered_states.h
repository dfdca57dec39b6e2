// Where the masters and states of parameters are, in memory or in a store, and how they get there.
//
// In memory each tensor of a shard lies in one piece: master (unless the parameter is its own),
// state 0, state 1, each in whole blocks, charged as Role::kOptimizer. In the store they lie as
// sub_group.h says; every tensor of every piece is an extent with a name.
//
// States of a parameter are made when it is trainable for the first time, and stay.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/sub_group.h"
#include "tessera/optim/tiered_parts.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class TieredStates {
 public:
  TieredStates(shard::ParamTable& params, device::Device& device, Kernels& kernels,
               const RuleOptions& rule, const TieredParts& parts);
  TieredStates(const TieredStates&) = delete;
  TieredStates& operator=(const TieredStates&) = delete;

  bool has(int id) const { return slots_[static_cast<std::size_t>(id)].exists; }
  // Takes room: moments are zero, the master is not made yet. Once per parameter.
  void add(int id);
  // From the shard, tile by tile through leases; `values`: a copy of a shard that the host cannot
  // read, else null.
  void make_master(int id, const std::byte* values = nullptr);

  SubGroupPlan plan() const;  // of what is trainable now. REQUIRES: has() all of it.
  // Tensor 0 is the master, if there is one, then come the states. Null: stored.
  float* in_memory(int id, std::size_t tensor) const;
  // Elements [0, shard_numel) of a stored tensor, tile by tile through leases.
  void read(int id, std::size_t tensor, float* to) const;
  // The same of a stored parameter that is its own master.
  void read_parameter(int id, float* to) const;

  std::size_t num_tensors(int id) const;
  std::int64_t num_updates(int id) const { return slots_[static_cast<std::size_t>(id)].updates; }
  void count_update(int id) { ++slots_[static_cast<std::size_t>(id)].updates; }

 private:
  struct Slot {
    bool exists = false;
    device::Memory memory;
    std::int64_t offset = -1;  // of stored states
    std::int64_t updates = 0;  // the step that corrects the moments
  };
  // One cut of a shard, as sub_group.h cuts it.
  struct Tile {
    std::int64_t begin = 0;
    std::int64_t numel = 0;
    std::size_t tensor_bytes = 0;
    std::uint64_t states_offset = 0;  // where its first tensor is stored
  };
  std::vector<Tile> tiles(int id) const;
  StoredParts stored(int id) const { return parts_.stored[static_cast<std::size_t>(id)]; }
  void allocate_extents(int id);

  shard::ParamTable& params_;
  device::Device& device_;
  Kernels& kernels_;
  const RuleOptions rule_;
  const TieredParts& parts_;
  std::vector<Slot> slots_;  // by id
};

}  // namespace tessera::optim
