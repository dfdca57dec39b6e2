// Makes parameters available to units and releases them: records the order of uses, makes a plan
// from it, and carries the plan out.
//
//   begin_use(unit)   gathers what the unit needs: prefetched before, in flight, or started now;
//                     then starts the prefetches that the plan lists for this use
//   end_use(unit)     releases what the plan does not keep
//   end_step()        releases everything (the update makes gathered copies stale)
//   start_ahead()     after the update: starts the gathers with which the next pass begins
//
// It owns the units and the open uses, and connects Gatherer (calls and arena), Prefetcher (traces,
// plans and what is started ahead) and Consensus (ranks that use different units).
//
// Order of gathers: the order of uses while a trace is recorded or was missed; the plan (a pure
// function of trace and options) while one is followed. Which trace is followed depends on the uses
// before it. So the order is the same on every rank that runs the same program, and never depends
// on time; if ranks differ, Group's tags name the first difference. Inside a call parameters are
// ordered by id. For dynamic units see consensus.h. Prefetch is a hint: it never changes results.
//
// Invariants:
//  (1) Available parameters without a user take at most live_limit_bytes, or the bytes of one unit
//      if that is more. Where each use ends before the next begins, that bounds all available
//      parameters together.
//  (2) At most max_inflight calls are in flight. A prefetch has at most bucket_bytes, unless one
//      parameter alone is larger.
//  (3) A parameter is counted by its users, and is never released while it has one.
//
// Errors: illegal moves (the end of a use that did not begin, a step inside a use, gathers that are
// left over) are StateErrors with unit and parameter. After a failure release_all() still works.
//
// Threads: as Param: the step's thread, or autograd on its behalf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/coordinator/consensus.h"
#include "tessera/coordinator/gather_phases.h"
#include "tessera/coordinator/gather_stats.h"
#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/coordinator/unit_table.h"
#include "tessera/core/clock.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera {
class Config;
}

namespace tessera::coordinator {

class EncodedShards;
class SecondaryShards;
class ShardLoader;

struct CoordinatorOptions {
  PlanBudgets budgets;
  std::int64_t persist_param_bytes = 0;
  std::int64_t persist_model_bytes = 0;
  std::size_t max_traces = 32;
  // True: ranks agree on every use even if no unit is dynamic, because some may run out of data
  // before others.
  bool uneven_data = false;
  static CoordinatorOptions from(const Config& config);
};

// What the coordinator works with. All of it outlives the coordinator.
struct CoordinatorParts {
  comm::Group& group;  // the ranks over which parameters are cut, by shard
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  Logger logger;
  GatherPhases phases = {};
  // All ranks that train the model, which may hold several copies of it; used for agreement. Null:
  // `group`.
  comm::Group* all_ranks = nullptr;
  // ranks_of_copy[r] is the rank in `all_ranks` of rank r of `group`; empty: r.
  std::vector<int> ranks_of_copy = {};
  // The group of secondary shards (secondary_shards.h); null: there are none.
  comm::Group* secondary = nullptr;
  // Codec of quantised gathers (encoded_shards.h), for device memory; null: shards are gathered as
  // they are.
  const comm::Codec* codec = nullptr;
};

// Where shards are offloaded and memory is planned.
struct TierOptions {
  // Outlives the coordinator. Null: no shard is on NVMe, and the coordinator makes its own loader
  // for shards in host memory.
  ShardLoader* loader = nullptr;
  std::int64_t live_limit_bytes = 0;
  std::size_t arena_bytes = 0;
  // 0: the options' values.
  int max_inflight = 0;
  std::int64_t reuse_distance_bytes = 0;
};

// One unit, for inspection.
struct UnitReport {
  const UnitInfo* info = nullptr;
  bool is_open = false;
  // Counts since construction.
  GatherCounts forward;
  GatherCounts backward;
  GatherCounts inference;
};

// Memory: gathered parameters lie in one arena of min(live limit, all parameters) + largest unit
// bytes, each parameter rounded up to the arena's alignment, made at the first use, unless
// set_tier() gives other sizes. In a group of one, parameters in device memory are used in place;
// if all are, there is neither arena nor plan. Shards in host memory and on NVMe are first loaded
// into their own slot of the gathered parameter; the group waits for that, not the caller.
//
// [Note: overlapping uses] Uses may overlap in any way: units inside units, or in backward a use
// that ends after the next has begun. What the plan releases or keeps is decided when a use begins
// and done when the parameter's last user has ended. Leaves are gathered whole: while one is open,
// uses of units inside it do nothing.
class Coordinator {
 public:
  Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // REQUIRES: before the first use. `params`: ids, in any order; several units may name the same
  // parameter.
  UnitId add_unit(std::string name, const std::vector<int>& params, UnitTraits traits = {});
  // Adds a parameter to a unit, before the first use: tied weights, weights used outside of their
  // unit.
  void add_external(UnitId unit, int param) { units_.add_param(unit, param); }
  // Before the first use. Throws ConfigError for a rule that matches no unit.
  void set_leaves(const LeafRule& rule) { units_.mark_leaves(rule, true); }
  void clear_leaves(const LeafRule& rule) { units_.mark_leaves(rule, false); }
  std::vector<std::string> leaves() const { return units_.leaves(); }
  void set_dynamic_gradients(DynamicGradients gradients) { gradients_ = std::move(gradients); }
  // Fixes which units are inside leaves; leaves cannot be changed afterwards.
  void expand_leaves() { units_.expand_leaves(); }
  // REQUIRES: before finalize(), which reads from the parameters which shards are on NVMe.
  void set_tier(const TierOptions& tier);
  // Between steps, before shards are written from outside: releases what is gathered, and drops
  // what was read or gathered ahead. Called at the same point on all ranks.
  void forget_copies();
  // Between steps, after end_step(): drop_gathers() frees everything that gathers, so that shards
  // may move; change_tier() then gathers from their new tiers. Traces are recorded anew.
  void drop_gathers();
  void change_tier(const TierOptions& tier);
  // Declares the model complete; the first use calls it if needed. Afterwards the parameters of
  // units, leaves included, are final.
  void finalize();

  std::size_t num_units() const { return units_.num_units(); }
  const UnitInfo& unit(UnitId unit) const { return units_[unit]; }
  const std::string& unit_name(UnitId unit) const { return units_[unit].name; }
  UnitReport report(UnitId unit) const;
  bool persists(int param) const;  // false before finalize()
  // True if a leaf around the unit is open, so that a use of the unit does nothing.
  bool is_inside_open_leaf(UnitId unit) const;

  void begin_use(UnitId unit, Phase phase);
  // Throws ConfigError if one of the parameters was written to; the use has ended nevertheless.
  void end_use(UnitId unit, Phase phase);
  // Gathers parameters for a caller that is not a unit, and waits for them; they are readable until
  // end_hold(). Collective, in the caller's order; not part of any trace. `what` is named in
  // errors. Where gathers are quantised (encoded_shards.h), units compute with decoded values, in
  // training and in inference. A hold gathers unquantised values, which end_hold() releases; inside
  // a use, or while parameters are resident, it exposes the decoded ones instead: then the caller
  // asks is_decoded() first. A unit that runs during a hold uses the hold's values.
  void begin_hold(const std::vector<int>& params, const std::string& what);
  // `changed`: the shards were changed since they were gathered; other copies of them are freed.
  void end_hold(const std::vector<int>& params, const std::string& what, bool changed);
  // Gathers everything, if it fits into the live limit, until end_resident(): for many inferences
  // between two steps. False: it does not fit, and nothing has changed. Collective.
  bool begin_resident();
  void end_resident();
  // True if the parameter is resident with decoded values, with which units compute.
  bool is_decoded(int id) const;

  // Call it before shards are updated; it also waits until no dropped gather reads them.
  // Collective: where ranks need no consensus, it compares the uses of the step; the step fixes the
  // order. Where calls are work of streams it does not wait for the result, which
  // Group::wait_agreed() of all ranks throws. REQUIRES: no use is open; with such calls, that this
  // is called before anything is updated.
  void end_step();
  // Call it after shards were updated, or if the update is skipped.
  void start_ahead();
  // Call it before the memory of device copies (shard::DeviceCopy) is freed, which is ordered after
  // the reduce stream. REQUIRES: the updates are done.
  void forget_device_copies();
  // After an exception: closes all uses, waits for what is in flight, releases everything but what
  // persists, and forgets this pass. The engine is usable afterwards.
  void release_all() noexcept;

  // Where ranks agree on each use (consensus.h); does nothing elsewhere.
  bool needs_consensus();
  void reach_consensus(ConsensusPoint point, std::string_view what = {});
  // For a rank without data: joins the uses of the other ranks up to their next consensus point.
  // kAllDone: no rank has data any more.
  ConsensusPoint join();

  TraceMode trace_mode() const;
  CoordinatorStats take_stats();
  std::int64_t full_bytes() const;    // full parameters held now
  std::int64_t unused_bytes() const;  // those without a user
  std::size_t num_calls_in_flight() const;
  // Bytes of the arena; 0 before the first use and where nothing is gathered.
  std::size_t arena_bytes() const;

 private:
  enum class OpenKind : std::uint8_t { kStatic, kDynamic, kInsideLeaf, kResident };
  struct OpenUse {
    Use use;
    OpenKind kind = OpenKind::kStatic;
    std::size_t number = 0;  // in the pass
  };

  static std::size_t index_of(const shard::Param& param) {
    return static_cast<std::size_t>(param.id());
  }
  void use_tier(const TierOptions& tier);
  void make_gathers();
  [[noreturn]] void throw_state(const std::string& message, UnitId unit) const;
  bool has_gathers() const;  // some shard is not the full parameter
  bool has_loads() const;
  std::vector<shard::Param*> params_of(const std::vector<int>& ids) const;

  void begin_static(const UnitInfo& unit, const Use& use);
  void begin_dynamic(const UnitInfo& unit, const Use& use);
  void open(const UnitInfo& unit, const OpenUse& use);
  void remove_users(std::span<shard::Param* const> params, const std::string& what, bool changed);
  // Attaches parameters that are used in place: no list, no plan, no event.
  void attach(std::span<shard::Param* const> params);
  // Parameters that are not gathered: `bytes` more of them are in use, or less.
  void use_in_place(std::int64_t bytes);
  void wait_for_update(const shard::Param& param);
  comm::Group& all_ranks() const {
    return parts_.all_ranks != nullptr ? *parts_.all_ranks : parts_.group;
  }
  device::Pending start_comparing_uses();
  void forget_loaded_copies();

  const CoordinatorParts parts_;
  CoordinatorOptions options_;
  std::optional<TierOptions> tier_;
  const bool is_alone_;
  device::Stream& compute_;
  UnitTable units_;
  DynamicGradients gradients_;

  std::vector<OpenUse> open_;  // in the order of their begins
  std::size_t num_static_open_ = 0;
  bool is_resident_ = false;
  std::optional<Use> joined_;   // a use of other ranks in which this rank takes part
  int num_given_up_ = 0;        // passes given up because of an exception
  std::string given_up_;        // its description, for comparisons; empty: none
  std::uint64_t num_uses_ = 0;  // since take_stats()

  // Parameters that are used in place.
  std::vector<std::uint64_t> seen_versions_;  // by parameter id: updates already waited for
  std::int64_t own_bytes_ = 0;
  std::int64_t own_bytes_peak_ = 0;

  // Set by finalize() if something is gathered: several ranks, or shards outside of device memory.
  std::unique_ptr<ShardLoader> own_loader_;
  ShardLoader* loader_ = nullptr;  // null: all shards are in the device's memory
  std::unique_ptr<SecondaryShards> secondary_;
  std::unique_ptr<EncodedShards> encoded_;
  std::unique_ptr<Gatherer> gatherer_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::unique_ptr<Consensus> consensus_;  // null: all ranks use the same units
};

}  // namespace tessera::coordinator
