// Second copies of shards (hpZ): what a parameter's first gather has brought is cut once more, over
// the ranks of a smaller group, such as those of one host, and later gathers come from there until
// the parameter changes. They move the same bytes into the same place, so no bit changes; what
// crosses hosts is the first gather alone.
//
// Invariants:
//  (1) A secondary shard carries the number of the parameter's update that it was made from
//      (Param::version()), and is used for that version only: an update, a load and an edit make it
//      stale, a skipped step does not.
//  (2) Its version is part of what ranks compare before a gather from it moves anything: a rank
//      whose secondary shard is of another update is named on every rank.
//  (3) It is made when a gather by all ranks has been waited for, by its first user. So which
//      gathers come from it follows from uses, plan and updates, and is the same on all ranks.
//  (4) Parameters that only some ranks gather have none, nor have those on NVMe, whose reads are
//      planned; and in a group of one there is nothing to gather.
//
// Memory: a piece of the padded parameter, taken from the device when it is first made, and kept.
//
// What fixes the order of gathers: as in gatherer.h; those of one call that come from secondary
// shards follow the others, in a call of their own on a group of their own.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

class SecondaryShards {
 public:
  // All of it outlives this. `group`: consecutive ranks of those that the parameters are cut over,
  // whose number it divides.
  SecondaryShards(comm::Group& group, device::Device& device, shard::ParamTable& params);

  comm::Group& group() const { return group_; }
  // Of the parameter's present values.
  bool has(const shard::Param& param) const;
  // Behind what has been enqueued for computing: cuts the full parameter, which is available.
  // `by_all`: all ranks have gathered it.
  void keep(const shard::Param& param, bool by_all);
  // Of a gather into `full`. InternalError with the name for values that are not the present ones.
  comm::Gather gather(const shard::Param& param, void* full) const;
  // When its memory may be read.
  const device::Pending& made(const shard::Param& param) const { return slot_of(param).made; }
  // What ranks compare beside names and sizes.
  std::uint64_t hash_of_versions(std::span<const int> ids) const;

 private:
  struct Slot {
    device::Memory memory;
    device::Pending made;
    bool is_made = false;
    std::uint64_t version = 0;
  };
  const Slot& slot_of(const shard::Param& param) const {
    return slots_[static_cast<std::size_t>(param.id())];
  }
  std::int64_t numel_of(const shard::Param& param) const;

  comm::Group& group_;
  device::Device& device_;
  shard::ParamTable& params_;
  std::vector<Slot> slots_;  // by parameter id
};

}  // namespace tessera::coordinator
