// Starts and finishes gathers: moves parameters between released and available, in an arena of its
// own, and counts bytes, hits and waiting. When and what is decided elsewhere.
//
// Order of work, for one parameter:
//
//   update of the shard, last reader of the arena's bytes -> gather stream -> all-gather
//   all-gather -> compute stream (the unit reads it) -> release
//
// A shard that is not in the device's memory is loaded (shard_loader.h) into this rank's slot of
// the full parameter before the all-gather, which waits for it; in a group of one that is all.
// Parameters that are used in place (a group of one, in the device's memory) are not gathered.
// A shard that is stored as blocks is loaded behind the full parameter, and the all-gather decodes
// it; in a group of one the loader does, as soon as it is there.
//
// Where shards are encoded (encoded_shards.h), the gather brings wires and decodes them, but for
// causes that want exact values.
//
// Where phases are given (gather_phases.h), a gather by all ranks is two calls; the second waits
// for the first on the groups' side, not on the caller's. What the first brings of wires lies
// beside the full parameter, in the arena if it has room, until the call is known to be done: the
// gather stream is never ordered behind a call in flight by whoever gets that memory next, since
// the call may wait for an encoding that is itself behind the gather stream.
//
// Invariants:
//  (1) A parameter has a block of the arena exactly while it is gathering or available.
//  (2) A parameter that was prefetched and not used yet is gathering, even if its gather is done.
//  (3) At most max_inflight calls are in flight; a further one waits for the oldest. Plans stay
//      below that by themselves; what comes beside them may not.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/coordinator/encoded_shards.h"
#include "tessera/coordinator/gather_phases.h"
#include "tessera/coordinator/gather_stats.h"
#include "tessera/coordinator/secondary_shards.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/clock.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/arena.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

// Why a gather was started, and for whom.
enum class Reason : std::uint8_t { kDemand, kPrefetch };
struct Cause {
  UnitId unit = -1;  // -1: for somebody who is no unit
  Phase phase = Phase::kForward;
  Reason reason = Reason::kDemand;
  bool exact = false;  // as shards are, also where gathers are quantised
};

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
    GatherPhases phases = {};
    SecondaryShards* secondary = nullptr;  // null: there are no secondary shards
    EncodedShards* encoded = nullptr;      // null: gathers bring shards as they are
  };
  Gatherer(const Parts& parts, std::size_t num_units, std::size_t arena_bytes, int max_inflight);
  // A gather that has failed may have shards on their way into the arena.
  ~Gatherer() {
    wait_for_loads();
    for (InFlight& call : calls_) {
      forget(call);
    }
  }
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // One call, for the parameters of `ids` that are released; none if there are none. `offsets`: one
  // per id, or none; -1, or an offset that is taken, means best fit. `unit` is named in errors.
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
  // Everything that has no user, but what `stays` (by parameter id). What was gathered in vain is
  // dropped: its block stays taken until the gather is done.
  void release_idle(const std::vector<bool>& stays);
  // For somebody who wants exact values: gives back what was gathered quantised and has no user.
  void release_quantised(std::span<const int> ids);
  // Gathers of it bring wires, unless somebody wants exact values.
  bool is_encoded(const shard::Param& param) const {
    return parts_.encoded != nullptr && parts_.encoded->covers(param);
  }
  // It was gathered for somebody who wants exact values, which units do not compute with.
  bool is_exact_for_once(const shard::Param& param) const;
  // What has been enqueued for computing so far.
  device::Pending computed() { return compute_.record(); }
  // The shard of a dropped parameter is still read: orders whatever writes shards behind that.
  void wait_for_drops();
  // After an exception: as release_idle(), once every gather is done, whatever its outcome.
  void abandon(const std::vector<bool>& stays) noexcept;

  // A gather of it by all ranks would begin with the parameter's shard, not with a secondary one.
  bool reads_shard(const shard::Param& param) const;
  std::int64_t full_bytes() const { return full_bytes_; }
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::size_t num_calls();  // that are not done, also if their parameters were all dropped
  // By unit and phase; unit -1 stands for those who are no unit.
  GatherCounts& counts(UnitId unit, Phase phase);
  // Adds what was counted since the last call.
  void take_stats(CoordinatorStats& stats);

 private:
  struct Slot {  // of a parameter
    device::ArenaBlock block;
    device::Pending gathered;  // while it is gathering
    Cause cause;
    bool by_all = false;  // ranks
  };
  struct InFlight {
    std::vector<device::Pending> gathered;
    std::vector<device::ArenaBlock> scratch;
  };
  struct Call {  // that is put together
    std::vector<shard::Param*> members;
    std::vector<int> ids;  // of the members
    std::vector<comm::Gather> tensors;
    std::vector<device::Pending> loads;                 // of those that are not on the device
    std::vector<device::Pending> ready;                 // what else its input waits for
    std::vector<device::ArenaBlock> scratch;            // until it is done
    const device::PendingState* last_update = nullptr;  // that it is ordered behind
    std::uint64_t bytes = 0;
    void clear();
  };

  Slot& slot_of(const shard::Param& param) { return slots_[static_cast<std::size_t>(param.id())]; }
  // `wants`: none: all ranks want them. Takes those of `ids` whose values come from there.
  enum class From : std::uint8_t { kShards, kSecondary };
  void start_call(From from, std::span<const int> ids, std::span<const std::int64_t> offsets,
                  std::span<const std::uint8_t> wants, const std::string& unit, const Cause& cause);
  bool comes_from(From from, const shard::Param& param, const Cause& cause) const;
  bool is_encoded(const shard::Param& param, const Cause& cause) const {
    return !cause.exact && is_encoded(param);
  }
  void take(shard::Param& param, std::int64_t offset);
  // `full`: null: only other ranks get it, and the shard is loaded to `scratch` where it must be.
  void add(const shard::Param& param, void* full, std::byte* scratch);
  void add_encoded(const shard::Param& param, void* full, std::byte* scratch);
  // Its shard, where that is loaded to.
  std::byte* load_shard(const shard::Param& param, void* full, std::byte* scratch);
  // Of call_, by all ranks of the group.
  std::vector<device::Pending> start_gathers(From from, const std::string& unit,
                                             const Cause& cause);
  // In a group of one: what was loaded is there, and what lies on the device as blocks is decoded.
  std::vector<device::Pending> start_alone(const std::string& unit, const Cause& cause);
  // An exception came while a call was put together: nothing of it stays.
  void undo_call();
  // The call is on its way. `gathered`: of each member, or of all together.
  void note_call(std::vector<device::Pending> gathered, std::int64_t begin_ns, const Cause& cause,
                 bool by_all);
  void order_behind_update(const shard::Param& param);
  comm::CallOptions call_options(const std::string& unit, std::span<const int> ids,
                                 const Cause& cause) const;
  void log_call(const std::string& unit, const char* how) const;
  void forget_done_calls();
  void forget(InFlight& call);
  void wait_for_calls_below(std::size_t limit);
  double wait(const device::Pending& gathered, LabelId unit);
  void drop(shard::Param& param);
  void free_block(const shard::Param& param, const device::Pending& last_use);
  void wait_for_loads() noexcept {
    if (parts_.loader != nullptr) {
      parts_.loader->wait_idle();
    }
  }

  const Parts parts_;
  device::Stream& compute_;
  device::Stream& gather_;
  const std::size_t arena_bytes_;
  const std::size_t max_inflight_;
  device::Arena arena_;
  std::vector<Slot> slots_;  // by parameter id
  std::deque<InFlight> calls_;
  std::vector<device::Pending> drops_;
  Call call_;
  std::int64_t full_bytes_ = 0;
  std::int64_t full_bytes_peak_ = 0;
  std::uint64_t num_misplaced_ = 0;    // since take_stats()
  std::uint64_t secondary_bytes_ = 0;  // since take_stats()
  std::uint64_t encoded_bytes_ = 0;    // since take_stats()
  std::uint64_t wire_bytes_ = 0;       // since take_stats()
  std::uint64_t overflows_taken_ = 0;  // by take_stats()
  std::vector<GatherCounts> counts_;   // by unit and phase
  std::vector<GatherCounts> taken_ = std::vector<GatherCounts>(kNumPhases);
};

}  // namespace tessera::coordinator
