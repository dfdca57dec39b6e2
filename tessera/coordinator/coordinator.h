// Makes parameters available to units and releases them: records the order of uses, plans ahead
// from it, and carries the plan out.
//
//   begin_use(unit)   what the unit needs is gathered: prefetched before, in flight, or now;
//                     then the prefetches of the plan are started
//   end_use(unit)     what the plan does not keep is released
//   end_step()        everything is released (the update makes gathered copies stale)
//   start_ahead()     after the update: the gathers with which the next pass will begin
//
// What fixes the order of gathers: the order of uses while a trace is recorded or has been departed
// from; the plan (a pure function of trace and options) while one is followed. Which trace is
// followed depends on the uses before it (trace_book.h). All of it is the same on every rank that
// runs the same program; Group's tags name the first difference otherwise. Nothing depends on time.
// Inside a call parameters are ordered by id. Where units are dynamic, see meeting.h.
//
// Prefetch is a hint: a use that the trace does not expect drops what was gathered in vain at once,
// gathers what it needs, and goes on with another trace that fits, or without a plan; results never
// change.
//
// Memory: full parameters lie in one arena of min(live limit, all parameters) + largest unit bytes,
// each parameter rounded up to the arena's alignment, made at the first use, unless set_tier() says
// otherwise. In a group of one what is in the device's memory is used where it lies; if all is,
// there is neither arena nor plan. Shards in memory of the host (shard_loader.h) are copied into their
// own slot of the gathered parameter.
//
// Shards on NVMe are brought into their own slot of the gathered parameter first; the
// group waits for that, not the caller. While a plan is followed, the shards of the uses that come
// after those that are gathered ahead are read, in the order of use.
//
// Limits, at every moment: full parameters that nobody uses are at most live_limit_bytes, or one
// unit if that is more; where each use ends before the next begins, so are all full parameters
// together. At most max_inflight calls are in flight, and a prefetch has at most
// bucket_bytes, unless one parameter alone is larger.
//
// [Note: overlapping uses] Uses may overlap in any way: units inside units, or in backward a use
// that ends after the next has begun. Parameters are counted by their users, and none is released
// while it has one. What the plan releases or keeps is decided when a use begins and done when the
// last user has gone. A prefetch that finds its room still taken by an earlier use is held back
// until that use ends; at the latest it starts when the next use begins, so that the order of
// gathers depends on the begins of uses alone.
//
// Leaves are gathered whole: while one is open, uses of units inside it are nothing of their own.
//
// Errors: illegal moves (end of a use that did not begin, a step inside a use, gathers that are
// left over) are StateErrors with unit and parameter. After a failure release_all() still works.
//
// Threads: as Param: the step's thread or autograd on its behalf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/coordinator/gather_counts.h"
#include "tessera/coordinator/leaf_rule.h"
#include "tessera/coordinator/meeting.h"
#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/coordinator/unit_table.h"
#include "tessera/core/clock.h"
#include "tessera/core/ledger.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera {
class Config;
}

namespace tessera::coordinator {

struct CoordinatorOptions {
  PlanBudgets budgets;
  std::int64_t persist_param_bytes = 0;
  std::int64_t persist_model_bytes = 0;
  std::size_t max_traces = 32;
  // Ranks meet at every use also if no unit is dynamic: some may run out of data before others.
  bool uneven_data = false;
  static CoordinatorOptions from(const Config& config);
};

// What the coordinator works with; all of it outlives the coordinator.
struct CoordinatorParts {
  comm::Group& group;
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  Logger logger;
};

// Where shards are stored and memory is planned.
struct TierOptions {
  // Outlives the coordinator; null: no shard is on NVMe, and what is in host memory is loaded by a
  // loader of the coordinator's own.
  ShardLoader* loader = nullptr;
  std::int64_t live_limit_bytes = 0;
  std::size_t arena_bytes = 0;
  // 0: as the options say.
  int max_inflight = 0;
  std::int64_t reuse_distance_bytes = 0;
};

// Gradients of dynamic parameters, which are reduced where all ranks have met.
struct DynamicGradients {
  std::function<std::vector<int>()> pending;  // ids that this rank has one of
  std::function<void(std::span<const int> ids)> reduce;
};

// Since the last take_stats(). In a group of one only what is stored is gathered: if nothing is,
// all but num_uses and full_bytes_peak stay 0.
struct CoordinatorStats {
  std::uint64_t num_uses = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  std::uint64_t prefetch_drops = 0;
  std::uint64_t num_gathers = 0;  // calls
  std::uint64_t gathered_bytes = 0;
  double exposed_wait_s = 0;  // host time that uses waited for gathers
  // Gathered parameters at once; in a group of one: in use at once.
  std::int64_t full_bytes_peak = 0;
  std::uint64_t brought_bytes = 0;  // of them, from memory of the host to a device with its own
  std::uint64_t arena_overflows = 0;
  std::uint64_t arena_misplaced = 0;  // gathers that did not get the place that was planned
  std::uint64_t num_meetings = 0;
  GatherCounts forward;
  GatherCounts backward;
  GatherCounts inference;
};

// One unit, for those who look.
struct UnitReport {
  const UnitInfo* info = nullptr;
  bool is_open = false;
  // Since the start.
  GatherCounts forward;
  GatherCounts backward;
  GatherCounts inference;
};

class Coordinator {
 public:
  Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Before the first use. `params`: ids, in any order; several units may name the same parameter.
  UnitId add_unit(std::string name, const std::vector<int>& params, UnitTraits traits = {});
  // One more parameter for a unit, before the first use: tied weights, weights used outside.
  void add_external(UnitId unit, int param);
  // Before the first use. Throws ConfigError for a rule that matches no unit.
  void set_leaves(const LeafRule& rule);
  void clear_leaves(const LeafRule& rule);
  std::vector<std::string> leaves() const;
  void set_dynamic_gradients(DynamicGradients gradients);
  // What is inside leaves is known afterwards: no leaf is chosen any more.
  void settle_units();
  // Before seal(), which finds out from the parameters which shards are stored.
  void set_tier(const TierOptions& tier);
  // The model is complete; the first use says it by itself. Afterwards the units' parameters are
  // final, those of leaves included.
  void seal();

  std::size_t num_units() const;
  const UnitInfo& unit(UnitId unit) const;
  const std::string& unit_name(UnitId unit) const { return this->unit(unit).name; }
  UnitReport report(UnitId unit) const;
  bool persists(int param) const;  // false before seal()
  // A use of it would be nothing of its own now: a leaf around it is open.
  bool is_inside_open_leaf(UnitId unit) const;

  void begin_use(UnitId unit, Phase phase);
  // Throws ConfigError if one of the parameters was written to; the use has ended all the same.
  void end_use(UnitId unit, Phase phase);
  // Parameters for somebody who is no unit: gathered, waited for and readable until end_hold().
  // Collective, in the caller's order; not part of any trace. `what` is named in errors.
  void begin_hold(const std::vector<int>& params, const std::string& what);
  // `changed`: the shards are no longer those that were gathered; other copies are let go.
  void end_hold(const std::vector<int>& params, const std::string& what, bool changed);
  // Everything is gathered, if that fits into the live limit, and stays until end_resident(): for
  // many inferences between two steps. False: it does not fit, and nothing has changed. Collective.
  bool begin_resident();
  void end_resident();
  bool is_resident() const;

  // Before shards are updated: it also waits until no dropped gather reads them any more.
  // Collective: where ranks do not meet, the uses of the step are compared; the step fixes the
  // order. REQUIRES: no use is open.
  void end_step();
  // After shards are updated, or are not going to be.
  void start_ahead();
  // Before the memory of copies on the device (shard::DeviceCopy) is given back, which is done
  // behind the reduce stream. REQUIRES: the updates are done.
  void forget_device_copies();
  // After an exception: closes all uses, waits for what is in flight, releases everything but what
  // persists, and forgets this pass. The engine is usable afterwards.
  void release_all();

  // Where ranks meet (meeting.h); nothing to do where they do not.
  bool meets();
  void meet(MeetingPoint point, std::string_view what = {});
  // For a rank without data: takes part in what the others use, up to their next point. kAllDone:
  // no rank has data any more.
  MeetingPoint follow();

  TraceMode trace_mode() const;
  CoordinatorStats take_stats();
  std::int64_t full_bytes() const;    // held now
  std::int64_t unused_bytes() const;  // of them, without a user
  std::size_t num_calls_in_flight() const;
  // Bytes of the arena; 0 before the first use and in a group of one.
  std::size_t arena_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::coordinator
