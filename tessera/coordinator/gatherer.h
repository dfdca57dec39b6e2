// Internal to coordinator: moves parameters between released and available where several ranks
// share them, and keeps the books of bytes, hits and waiting. It decides nothing about when.
//
// Order of work, for one parameter:
//
//   update of the shard, last reader of the arena's bytes -> gather stream -> all-gather
//   all-gather -> compute stream (the unit reads it) -> release
//
// Invariants:
//  (1) A parameter has a block of the arena exactly while it is gathering or available.
//  (2) A parameter that was prefetched and not used yet is gathering, even if its gather is done.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/clock.h"
#include "tessera/core/spans.h"
#include "tessera/device/arena.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

struct GathererStats {
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  std::uint64_t prefetch_drops = 0;
  std::uint64_t num_gathers = 0;
  std::uint64_t gathered_bytes = 0;
  double exposed_wait_s = 0;
  std::int64_t full_bytes_peak = 0;
};

class Gatherer {
 public:
  enum class Reason : std::uint8_t { kDemand, kPrefetch };

  // All of it outlives the gatherer.
  struct Parts {
    comm::Group& group;
    device::Device& device;
    shard::ParamTable& params;
    const Clock& clock;
    Spans& spans;
  };
  Gatherer(const Parts& parts, std::size_t arena_bytes);

  // One call, for the parameters of `ids` that are released; none if there are none.
  void start(std::span<const int> ids, const std::string& unit, Reason reason);
  // Waits for every parameter of a use that is gathering. Throws what went wrong with its gather.
  void finish(std::span<shard::Param* const> params, LabelId unit);

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

  std::int64_t full_bytes() const { return full_bytes_; }
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::uint64_t num_overflows() const { return arena_.stats().num_overflows; }
  // Since the last call; the peak starts again from what is held now.
  GathererStats take_stats();

 private:
  struct Slot {
    device::ArenaBlock block;
    device::Pending gathered;
    Reason reason = Reason::kDemand;
  };
  Slot& slot_of(const shard::Param& param) { return slots_[static_cast<std::size_t>(param.id())]; }
  void wait(const device::Pending& gathered, LabelId unit);
  void take(shard::Param& param, Reason reason);
  void give_back(const shard::Param& param, const device::Pending& last_use);

  const Parts parts_;
  device::Stream& compute_;
  device::Stream& gather_;
  const std::size_t arena_bytes_;
  device::Arena arena_;
  std::vector<Slot> slots_;  // by parameter id
  std::vector<device::Pending> drops_;
  std::vector<comm::Gather> tensors_;  // of the call that is put together
  std::vector<shard::Param*> members_;
  std::int64_t full_bytes_ = 0;
  GathererStats stats_;
};

}  // namespace tessera::coordinator
