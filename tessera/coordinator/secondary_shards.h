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
//  (4) Parameters that only some ranks gather have none; and in a group of one there is nothing to
//      gather.
//  (5) While there is one, the shard is not read for a gather by all: neither from host memory nor
//      from NVMe.
//
// Memory: a piece of the padded parameter, of the tier that its placement names, taken when it is
// first made, and kept. One in pinned host memory is written behind the gather by the write stream,
// and copied for every use into this rank's slot of the full parameter, by the gather stream: the
// host waits for neither.
//
// What fixes the order of gathers: as in gatherer.h; those of one call that come from secondary
// shards follow the others, in a call of their own on a group of their own.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
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
  // Waits for copies from and to the host. REQUIRES: no gather from it is in flight.
  ~SecondaryShards();
  SecondaryShards(const SecondaryShards&) = delete;
  SecondaryShards& operator=(const SecondaryShards&) = delete;

  comm::Group& group() const { return group_; }
  // Of the parameter's present values.
  bool has(const shard::Param& param) const;
  // Behind what has been enqueued for computing: cuts the full parameter, which is available.
  // `by_all`: all ranks have gathered it.
  void keep(const shard::Param& param, bool by_all);
  // Of a gather into `full` behind `stream`, which is ordered behind what is needed for it.
  // InternalError with the name for values that are not the present ones.
  comm::Gather start_gather(const shard::Param& param, void* full, device::Stream& stream);
  // `last_use` of the full parameter, with the copy to the host that may still read it.
  device::Pending with_copies(const shard::Param& param, const device::Pending& last_use) const;
  // What ranks compare beside names and sizes.
  std::uint64_t hash_of_versions(std::span<const int> ids) const;
  // H2D, and D2H, since the last call.
  std::uint64_t take_brought_bytes() { return std::exchange(brought_bytes_, 0); }
  std::uint64_t take_kept_bytes() { return std::exchange(kept_bytes_, 0); }

 private:
  struct Slot {
    device::Memory memory;
    bool is_on_host = false;  // of a discrete device
    device::Pending made;
    device::Pending brought;  // the last copy out of memory of the host
    bool is_made = false;
    std::uint64_t version = 0;
  };
  const Slot& slot_of(const shard::Param& param) const {
    return slots_[static_cast<std::size_t>(param.id())];
  }
  Slot& slot_of(const shard::Param& param) { return slots_[static_cast<std::size_t>(param.id())]; }
  std::int64_t numel_of(const shard::Param& param) const;

  comm::Group& group_;
  device::Device& device_;
  shard::ParamTable& params_;
  std::vector<Slot> slots_;  // by parameter id
  std::uint64_t brought_bytes_ = 0;
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace tessera::coordinator
