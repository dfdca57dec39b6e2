// Shards as they travel where gathers are quantised (qwZ): each rank keeps its shard of a parameter
// encoded (comm/codec.h), and gathers bring the wires of all ranks and decode them, this rank's
// own, too. So all ranks compute with the same values; shards, masters and updates stay exact.
//
// Invariants:
//  (1) A shard is encoded once per update, whatever number of gathers follows, behind the update.
//  (2) What is encoded carries the number of that update (Param::version()), and is used for that
//      version only. It is part of what ranks compare before a gather moves anything.
//  (3) Padding is encoded with the shard, and decodes to zero.
//  (4) Parameters of a group of one, those without elements, those that are stored encoded
//      (shard/stored_format.h), and types that no codec takes are gathered as they are; so is every
//      parameter for those who look at values or edit them.
//
// Memory: the wire of each shard lies in the device's memory, wherever the shard itself does, from
// its first gather on; in fp32 a quarter of the shard. So a shard in host memory or on NVMe is
// loaded once per update, and later gathers read nothing of it. Where it is loaded to is memory of
// its first gather. Two doubles of each parameter measure what encoding costs.
//
// Order: an encoding is work of the gather stream, handed to it by the caller where that blocks
// nobody, else by a thread that waits for the shard's update or load. Nothing here is a collective.
//
// Threads: as Param.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/codec.h"
#include "tessera/comm/group.h"
#include "tessera/coordinator/gather_stats.h"
#include "tessera/device/device.h"
#include "tessera/device/handed_over.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

class EncodedShards {
 public:
  // All of it outlives this. `codec`: of the device's memory.
  EncodedShards(const comm::Codec& codec, device::Device& device, shard::ParamTable& params);
  // Carries out what was asked for.
  ~EncodedShards();
  EncodedShards(const EncodedShards&) = delete;
  EncodedShards& operator=(const EncodedShards&) = delete;

  // Gathers of it bring wires.
  bool covers(const shard::Param& param) const;
  // The parameter's present values are encoded, or will be when made() is done.
  bool has(const shard::Param& param) const;
  // `values`: the shard, in the device's memory, once `ready` and the gather stream's work so far
  // are done; it must stay there until made() is. REQUIRES: covers(param).
  void start_encode(const shard::Param& param, const std::byte* values, device::Pending ready);
  const device::Pending& made(const shard::Param& param) const { return slot_of(param).made; }

  // Of a gather into `full`. InternalError with the name for values that are not the present ones.
  comm::Gather gather(const shard::Param& param, void* full) const;
  std::size_t wire_bytes(const shard::Param& param) const;
  // What ranks compare beside names and sizes.
  std::uint64_t hash_of_versions(std::span<const int> ids) const;

  // After an exception: what could not be encoded is tried again.
  void forget_failures() noexcept;

  // All gathers of the step are done: what was measured is that of its values.
  void end_step();
  // Of the last step that has ended.
  QuantError error();

 private:
  struct Slot {
    device::Memory wire;
    device::Pending made;
    bool is_made = false;
    std::uint64_t version = 0;
  };
  struct Job {
    const shard::Param* param = nullptr;
    const std::byte* values = nullptr;
    device::Pending ready;
    std::shared_ptr<device::HandedOver> owner;
  };
  // Orders the gather stream behind it, if that is so at once, or waits; throws what went wrong.
  void order_behind(const device::Pending& ready);
  const Slot& slot_of(const shard::Param& param) const {
    return slots_[static_cast<std::size_t>(param.id())];
  }
  // Behind the gather stream's work.
  device::Pending encode(const shard::Param& param, const std::byte* values);
  void carry_out();

  const comm::Codec& codec_;
  device::Device& device_;
  shard::ParamTable& params_;
  device::Stream& gather_;
  std::vector<Slot> slots_;  // by parameter id
  device::Memory sums_;      // by parameter id: squared error, squared values
  device::Memory copied_;    // of sums_, on the host, when `copied_when_` is done
  device::Pending copied_when_;
  std::vector<bool> is_copied_;  // by parameter id: it was encoded by then

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Job> jobs_;
  bool is_closing_ = false;

  std::thread worker_;  // from the first job that is queued on
};

}  // namespace tessera::coordinator
