// Internal to coordinator: moves parameters between released and available where several ranks
// share them, and keeps the books of bytes, hits and waiting. It decides nothing about when.
//
// Order of work, for one parameter:
//
//   update of the shard, last reader of the arena's bytes -> gather stream -> all-gather
//   all-gather -> compute stream (the unit reads it) -> release
//
// A shard that is stored, or in memory of the host on a device with its own, is brought to this
// rank's slot of the full parameter before the all-gather, which waits for it; in a group of one
// that is all. Parameters that are used where they lie (a group of one, in the device's memory) are
// none of its business.
//
// Invariants:
//  (1) A parameter has a block of the arena exactly while it is gathering or available.
//  (2) A parameter that was prefetched and not used yet is gathering, even if its gather is done;
//      it is in the registry then, and only then.
//  (3) At most max_inflight calls are in flight; a further one waits for the oldest. Plans stay
//      below that by themselves; what comes beside them may not.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/gather_counts.h"
#include "tessera/coordinator/inflight.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/clock.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/arena.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

class Gatherer {
 public:
  // All of it outlives the gatherer.
  struct Parts {
    comm::Group& group;
    device::Device& device;
    shard::ParamTable& params;
    const Clock& clock;
    Spans& spans;
    const Logger& logger;
    ShardLoader* loader;  // null: all shards are in the device's memory
  };
  Gatherer(const Parts& parts, std::size_t num_units, std::size_t arena_bytes, int max_inflight);
  // A gather that has failed may have shards on their way into the arena.
  ~Gatherer() { wait_for_loads(); }
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // One call, for the parameters of `ids` that are released; none if there are none. `offsets`: one
  // per id, or none; -1, or a place that is taken, means best fit. `unit` is named in errors.
  void start(std::span<const int> ids, std::span<const std::int64_t> offsets,
             const std::string& unit, const Cause& cause);
  // The same where only some ranks want the parameters; wants[r] says which, the same on all ranks.
  // Where this rank does, they are gathering afterwards.
  void start_to(std::span<const int> ids, std::span<const std::uint8_t> wants,
                const std::string& unit, const Cause& cause);
  // Waits for every parameter of a use that is gathering. Throws what went wrong with its gather.
  void finish(std::span<shard::Param* const> params, LabelId label, const Cause& user);

  // An available parameter; `last_use` is the work that read it last.
  void release(shard::Param& param, const device::Pending& last_use);
  // A parameter that was gathered in vain. Its block stays taken until the gather is done.
  void drop(shard::Param& param);
  // What has been enqueued for computing so far.
  device::Pending computed();
  // The shard of a dropped parameter is still read: orders whatever writes shards behind that.
  void wait_for_drops();
  // For after an exception: drops a parameter that is gathering, once its gather is done, whatever
  // its outcome; and the same for those that were dropped before.
  void finish_and_drop(shard::Param& param);
  void finish_drops() noexcept;

  InflightRegistry& inflight() { return inflight_; }
  std::int64_t full_bytes() const { return full_bytes_; }
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::uint64_t num_overflows() const { return arena_.stats().num_overflows; }
  std::uint64_t num_misplaced() const { return num_misplaced_; }  // not at their planned offset
  // Since the last call; it starts again from what is held now.
  std::int64_t take_peak();
  // By unit and phase; unit -1 stands for those who are no unit.
  GatherCounts& counts(UnitId unit, Phase phase);
  // Of all units together, since the last call.
  GatherCounts take_counts(Phase phase);

 private:
  double wait(const device::Pending& gathered, LabelId unit);
  // An exception came while a call was put together: nothing of it stays.
  void undo_call();
  void wait_for_loads() noexcept {
    if (parts_.loader != nullptr) {
      parts_.loader->wait_idle();
    }
  }
  void order_behind_update(const shard::Param& param);
  std::byte* own_slot(const shard::Param& param, void* full) const;
  // Where the shard is, or will be once ready_ is done.
  const std::byte* shard_of(const shard::Param& param, std::byte* slot);
  void take(shard::Param& param, std::int64_t offset);
  void give_back(const shard::Param& param, const device::Pending& last_use);
  comm::CallOptions call_options(const std::string& unit, std::span<const int> ids) const;
  void log_call(const std::string& unit, const char* how) const;

  const Parts parts_;
  device::Stream& compute_;
  device::Stream& gather_;
  const std::size_t arena_bytes_;
  const std::size_t max_inflight_;
  device::Arena arena_;
  InflightRegistry inflight_;
  std::vector<device::ArenaBlock> blocks_;  // by parameter id
  std::vector<device::Pending> drops_;
  std::vector<comm::Gather> tensors_;  // of the call that is put together
  std::vector<shard::Param*> members_;
  std::vector<int> member_ids_;
  const device::PendingState* last_update_ = nullptr;  // that the call is ordered behind
  std::vector<device::Pending> ready_;                 // what the call's input waits for
  std::int64_t full_bytes_ = 0;
  std::int64_t full_bytes_peak_ = 0;
  std::uint64_t num_misplaced_ = 0;
  std::vector<GatherCounts> counts_;
  std::vector<GatherCounts> taken_ = std::vector<GatherCounts>(kNumPhases);
};

}  // namespace tessera::coordinator
