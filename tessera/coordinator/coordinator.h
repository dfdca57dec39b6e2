// Makes parameters available to units and releases them: records the order of uses, plans ahead
// from it, and carries the plan out.
//
//   begin_use(unit)   what the unit needs is gathered: prefetched before, in flight, or now;
//                     then the prefetches of the plan are started
//   end_use(unit)     what the plan does not keep is released
//   end_step()        everything is released (the update makes gathered copies stale), the trace
//                     is completed
//
// What fixes the order of gathers: the order of uses while a trace is recorded or has been departed
// from; the plan (a pure function of trace and options) while it is complete. Both are the same on
// every rank that runs the same program; Group's tags name the first difference otherwise. Nothing
// depends on time. Inside a call parameters are ordered by id.
//
// Prefetch is a hint: a use that the trace does not expect drops what was gathered in vain at once,
// gathers what it needs, and the step goes on without a plan; results never change.
//
// Memory: full parameters lie in one arena of min(live limit, all parameters) + largest unit bytes,
// each parameter rounded up to the arena's alignment, made at the first use. In a group of one
// nothing is gathered, and there is neither arena nor plan.
//
// [Note: overlapping uses] Uses may overlap in any way: units inside units, or in backward a use
// that ends after the next has begun. Parameters are counted by their users, and none is released
// while it has one. What the plan releases or keeps is decided when a use begins and done when the
// last user has gone. A prefetch that finds its room still taken by an earlier use is held back
// until that use ends; at the latest it starts when the next use begins, so that the order of
// gathers depends on the begins of uses alone. full_bytes_peak is therefore at most live limit +
// largest unit if a use is ended before the next gathers on demand, and else exceeds it by what
// those earlier uses hold.
//
// Errors: illegal moves (end of a use that did not begin, a unit that is not known) are
// InternalErrors with unit and parameter. After a failed gather release_all() still works.
//
// Threads: as Param: the step's thread or autograd on its behalf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/coordinator/prefetch_plan.h"
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

// Since the last take_stats(). Bytes are those of full parameters, padding included. In a group of
// one nothing is gathered: all but num_uses and full_bytes_peak stay 0.
struct CoordinatorStats {
  std::uint64_t num_uses = 0;
  std::uint64_t prefetch_hits = 0;  // parameters that a use needed and that a prefetch had started
  std::uint64_t prefetch_misses = 0;  // parameters that had to be gathered on demand
  std::uint64_t prefetch_drops = 0;   // parameters that were prefetched in vain
  std::uint64_t num_gathers = 0;      // calls
  std::uint64_t gathered_bytes = 0;
  double exposed_wait_s = 0;  // host time that uses waited for gathers
  std::int64_t full_bytes_peak =
      0;  // gathered parameters at once; in a group of one: in use at once
  std::uint64_t arena_overflows = 0;
};

class Coordinator {
 public:
  Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Before the first use. `params`: ids, in any order; several units may name the same parameter.
  UnitId add_unit(std::string name, std::vector<int> params);
  // One more parameter for a unit, before the first use: tied weights, weights used outside.
  void add_external(UnitId unit, int param);
  const std::string& unit_name(UnitId unit) const;

  void begin_use(UnitId unit, Phase phase);
  void end_use(UnitId unit, Phase phase);
  // Parameters for somebody who is no unit: gathered, waited for and readable until end_hold().
  // Collective, in the caller's order; not part of any trace. `what` is named in errors.
  void begin_hold(const std::vector<int>& params, const std::string& what);
  // `changed`: the shards are no longer those that were gathered; other copies are let go.
  void end_hold(const std::vector<int>& params, const std::string& what, bool changed);
  // Before shards are updated: it also waits until no dropped gather reads them any more.
  // REQUIRES: no use is open.
  void end_step();
  // After an exception: closes all uses, waits for what is in flight, releases everything but what
  // persists, and lets the next step record anew. The engine is usable afterwards.
  void release_all();

  TraceMode trace_mode() const;
  CoordinatorStats take_stats();
  std::int64_t full_bytes() const;  // held now
  // Bytes of the arena; 0 before the first use and in a group of one.
  std::size_t arena_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::coordinator
