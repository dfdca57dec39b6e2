// Starts and finishes gathers: moves parameters between released and available, in its arena, and
// counts bytes, hits and waiting. It does not decide when and what to gather.
//
// Order of work, for one parameter:
//
//   update of the shard, last reader of the arena's bytes -> gather stream -> all-gather
//   all-gather -> compute stream (the unit reads it) -> release
//
// A shard that is not in device memory is loaded (shard_loader.h) into this rank's slot of the full
// parameter before the all-gather, which waits for the load; in a group of one there is only the
// load. Parameters that are used in place (a group of one, in device memory) are not gathered. A
// shard that is stored as blocks is loaded next to the full parameter, and the all-gather decodes
// it; in a group of one the loader decodes it as soon as it is loaded.
//
// Where shards are encoded (encoded_shards.h), the gather transfers wires and decodes them, unless
// its Cause asks for exact values.
//
// Where phases are given (gather_phases.h), a gather by all ranks is two calls; the groups order
// the second after the first, and the caller does not wait. The wires of the first call lie next to
// the full parameter, in the arena if it has free space, until the call is known to be done; so do
// the wires to which a secondary shard in host memory is copied. The next user of that memory must
// not order the gather stream after the call instead: the call may wait for an encoding that is
// itself ordered after the gather stream.
//
// Invariants:
//  (1) A parameter has a block of the arena exactly while it is gathering or available.
//  (2) A parameter that was prefetched and not used yet is gathering, even if its gather is done.
//  (3) At most max_inflight calls are in flight; a further one waits for the oldest. Plans stay
//      below that by themselves; calls outside of a plan may not.
//
// Threads: as Param.
#pragma once

#include <algorithm>
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
  UnitId unit = -1;  // -1: not for a unit (a hold)
  Phase phase = Phase::kForward;
  Reason reason = Reason::kDemand;
  bool exact = false;  // unquantised values, also where gathers are quantised
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
    EncodedShards* encoded = nullptr;      // null: shards are gathered as they are
  };
  Gatherer(const Parts& parts, std::size_t num_units, std::size_t arena_bytes, int max_inflight);
  // After a failed gather shards may still be in flight into the arena.
  ~Gatherer() {
    wait_for_loads();
    for (InFlight& call : calls_) {
      forget(call);
    }
  }
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Starts one call for those parameters of `ids` that are released; none if all are gathered.
  // `offsets`: one per id, or empty; -1, or an offset that is taken, means best fit. `unit` is
  // named in errors.
  void start(std::span<const int> ids, std::span<const std::int64_t> offsets,
             const std::string& unit, const Cause& cause);
  // The same where only ranks with wants[r] != 0 receive the parameters; `wants` is the same on all
  // ranks. On those ranks they are gathering afterwards.
  void start_to(std::span<const int> ids, std::span<const std::uint8_t> wants,
                const std::string& unit, const Cause& cause);
  // Waits for every parameter of a use that is gathering. Throws the failure of its gather.
  void finish(std::span<shard::Param* const> params, LabelId label, const Cause& user);

  // Releases an available parameter. `last_use` is the work that read it last.
  void release(shard::Param& param, const device::Pending& last_use);
  // Releases everything that has no user, except parameters with stays[id]. Unused gathers are
  // dropped: the block stays taken until the gather is done.
  void release_idle(const std::vector<bool>& stays);
  // Releases those of `ids` that were gathered quantised and have no user, so that a hold can
  // gather exact values.
  void release_quantised(std::span<const int> ids);
  // True if gathers of the parameter bring wires, unless the caller wants exact values.
  bool is_encoded(const shard::Param& param) const {
    return parts_.encoded != nullptr && parts_.encoded->covers(param);
  }
  // True if the parameter was gathered with exact values, with which units do not compute.
  bool is_exact_for_once(const shard::Param& param) const;
  // The work enqueued on the compute stream so far.
  device::Pending computed() { return compute_.record(); }
  // Orders writes of shards after dropped gathers, which may still read them; blocks on a CPU.
  void wait_for_drops();
  // After an exception: waits until every gather has ended or failed, then acts as release_idle().
  void abandon(const std::vector<bool>& stays) noexcept;

  // True if a gather of the parameter by all ranks reads its shard, not a secondary shard.
  bool reads_shard(const shard::Param& param) const;
  std::int64_t full_bytes() const { return full_bytes_; }
  // Bytes of parameters that are used in place, which count towards the peak of full parameters.
  void set_in_place_bytes(std::int64_t bytes) {
    in_place_bytes_ = bytes;
    note_peak();
  }
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::size_t num_calls();  // calls in flight, including those whose parameters were all dropped
  // By unit and phase; unit -1: gathers that are not for a unit.
  GatherCounts& counts(UnitId unit, Phase phase);
  // Adds what was counted since the last call.
  void take_stats(CoordinatorStats& stats);

 private:
  struct Slot {  // one per parameter
    device::ArenaBlock block;
    device::Pending gathered;  // while it is gathering
    Cause cause;
    bool by_all = false;  // ranks
  };
  struct InFlight {
    std::vector<device::Pending> gathered;
    std::vector<device::ArenaBlock> scratch;
  };
  struct Call {  // the call being assembled
    std::vector<shard::Param*> members;
    std::vector<int> ids;  // of the members
    std::vector<comm::Gather> tensors;
    std::vector<device::Pending> loads;                 // loads of shards outside of device memory
    std::vector<device::Pending> ready;                 // other work that its input waits for
    std::vector<device::ArenaBlock> scratch;            // freed when the call is done
    const device::PendingState* last_update = nullptr;  // the update it is ordered after
    std::uint64_t bytes = 0;
    void clear();
  };

  Slot& slot_of(const shard::Param& param) { return slots_[static_cast<std::size_t>(param.id())]; }
  // `wants`: empty: all ranks receive them. Takes those of `ids` that are gathered from `from`.
  enum class From : std::uint8_t { kShards, kSecondary };
  void start_call(From from, std::span<const int> ids, std::span<const std::int64_t> offsets,
                  std::span<const std::uint8_t> wants, const std::string& unit, const Cause& cause);
  bool comes_from(From from, const shard::Param& param, const Cause& cause) const;
  bool is_encoded(const shard::Param& param, const Cause& cause) const {
    return !cause.exact && is_encoded(param);
  }
  void take(shard::Param& param, std::int64_t offset);
  void note_peak() { full_bytes_peak_ = std::max(full_bytes_peak_, full_bytes_ + in_place_bytes_); }
  // `full` null: only other ranks receive it; a shard that must be loaded is loaded to `scratch`.
  void add(const shard::Param& param, void* full, std::byte* scratch);
  void add_encoded(const shard::Param& param, void* full, std::byte* scratch);
  void add_secondary(const shard::Param& param);
  // For the last tensor of call_, whose gather is by all ranks and brings wires.
  void keep_wires(const shard::Param& param);
  // Starts to load the shard into its slot of `full`, or to `scratch`; returns the address.
  std::byte* load_shard(const shard::Param& param, void* full, std::byte* scratch);
  // Starts the all-gathers of call_ by all ranks of the group.
  std::vector<device::Pending> start_gathers(From from, const std::string& unit,
                                             const Cause& cause);
  // In a group of one: the Pendings of loads, after blocks in device memory were decoded.
  std::vector<device::Pending> start_alone(const std::string& unit, const Cause& cause);
  // Undoes call_ after an exception while it was assembled.
  void undo_call();
  // Records a started call. `gathered`: one per member, or one for all.
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
  std::int64_t in_place_bytes_ = 0;
  std::int64_t full_bytes_peak_ = 0;        // of both together
  std::uint64_t num_misplaced_ = 0;         // since take_stats()
  std::uint64_t secondary_bytes_ = 0;       // since take_stats()
  std::uint64_t secondary_wire_bytes_ = 0;  // since take_stats()
  std::uint64_t encoded_bytes_ = 0;         // since take_stats()
  std::uint64_t wire_bytes_ = 0;            // since take_stats()
  std::uint64_t overflows_taken_ = 0;       // by take_stats()
  std::vector<GatherCounts> counts_;        // by unit and phase
  std::vector<GatherCounts> taken_ = std::vector<GatherCounts>(kNumPhases);
};

}  // namespace tessera::coordinator
