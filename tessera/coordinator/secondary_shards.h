// Second copies of shards (hpZ): what a parameter's first gather has brought is cut once more, over
// the ranks of a smaller group, such as those of one host, and later gathers come from there until
// the parameter changes. They move the same bytes into the same place, so no bit changes; what
// crosses hosts is the first gather alone.
//
// What travels as wires (encoded_shards.h, shards that are stored as blocks) is kept as wires: the
// gather by all ranks leaves those of this rank's piece here, and later gathers decode them again,
// to the bits of the first. Full precision is nowhere but in what is gathered.
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
// host waits for neither. Wires are written by the gather itself, and copied from host memory to
// scratch of the gather, since their slot is where they are decoded to.
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
  // For a gather by all ranks of what travels as wires: which of them to leave here. They count
  // from keep() on. None where nothing is to be kept. The gather comes behind in_flight().
  comm::KeptWires wires_to_keep(const shard::Param& param, const comm::Codec& codec);
  // Behind what has been enqueued for computing: cuts the full parameter, which is available.
  // `by_all`: all ranks have gathered it.
  void keep(const shard::Param& param, bool by_all);
  // Of a gather into `full` behind `stream`, which is ordered behind what is needed for it.
  // `scratch`: of scratch_bytes(), until the gather is done.
  // InternalError with the name for values that are not the present ones.
  comm::Gather start_gather(const shard::Param& param, void* full, std::byte* scratch,
                            device::Stream& stream);
  std::size_t scratch_bytes(const shard::Param& param) const;
  // The last gather that reads or writes it.
  void set_in_flight(const shard::Param& param, device::Pending gathered) {
    slot_of(param).in_flight = std::move(gathered);
  }
  const device::Pending& in_flight(const shard::Param& param) const {
    return slot_of(param).in_flight;
  }
  // What a gather of it moves, from all ranks of the group.
  std::size_t bytes_of_all(const shard::Param& param) const {
    return slot_of(param).memory.bytes() * static_cast<std::size_t>(group_.size());
  }
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
    bool is_on_host = false;             // of a discrete device
    const comm::Codec* codec = nullptr;  // of wires; null: elements
    device::Pending made;
    device::Pending brought;  // the last copy out of memory of the host
    device::Pending in_flight;
    bool is_made = false;
    std::uint64_t version = 0;
    std::uint64_t arriving = 0;  // the version of wires that the last gather leaves here
  };
  const Slot& slot_of(const shard::Param& param) const {
    return slots_[static_cast<std::size_t>(param.id())];
  }
  Slot& slot_of(const shard::Param& param) { return slots_[static_cast<std::size_t>(param.id())]; }
  std::int64_t numel_of(const shard::Param& param) const;
  // Of the parameter's shards, those that this rank keeps again.
  int num_kept_shards() const { return params_.num_ranks() / group_.size(); }
  bool is_kept(const shard::Param& param) const {
    return !param.dynamic() && !param.shard_is_full() && param.layout().numel() > 0;
  }
  void take_memory(const shard::Param& param, std::size_t bytes);

  comm::Group& group_;
  device::Device& device_;
  shard::ParamTable& params_;
  std::vector<Slot> slots_;  // by parameter id
  std::uint64_t brought_bytes_ = 0;
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace tessera::coordinator
