// Makes parameters available to units and releases them: records the order of uses, plans ahead
// from it, and carries the plan out.
//
//   begin_use(unit)   what the unit needs is gathered: prefetched before, in flight, or now;
//                     then the prefetches of the plan are started
//   end_use(unit)     what the plan does not keep is released
//   end_step()        everything is released (the update makes gathered copies stale)
//   start_ahead()     after the update: the gathers with which the next pass will begin
//
// It owns the units and the uses that are open, and wires Gatherer (calls and arena), Prefetcher
// (traces, plans and what is started ahead) and Consensus (ranks that use different units).
//
// What fixes the order of gathers: the order of uses while a trace is recorded or was missed; the
// plan (a pure function of trace and options) while one is followed. Which trace is followed
// depends on the uses before it. All of it is the same on every rank that runs the same program;
// Group's tags name the first difference otherwise. Nothing depends on time. Inside a call
// parameters are ordered by id. Where units are dynamic, see consensus.h. Prefetch is a hint: it
// never changes results.
//
// Memory: full parameters lie in one arena of min(live limit, all parameters) + largest unit bytes,
// each parameter rounded up to the arena's alignment, made at the first use, unless set_tier() says
// otherwise. In a group of one what is in the device's memory is used in place; if all is, there is
// neither arena nor plan. Shards in host memory and on NVMe are loaded into their own slot of the
// gathered parameter first; the group waits for that, not the caller.
//
// Where gathers are quantised (encoded_shards.h), units compute with what was decoded, in training
// and in inference alike. A hold shows exact values, and gives them back at its end. It shows what
// is being computed with inside of a use, and while parameters are resident: then the caller asks
// is_decoded() first. A unit that runs while a hold for reading is open computes with what that has
// gathered.
//
// Limits, at every moment: full parameters that nobody uses are at most live_limit_bytes, or one
// unit if that is more; where each use ends before the next begins, so are all full parameters
// together. At most max_inflight calls are in flight, and a prefetch has at most bucket_bytes,
// unless one parameter alone is larger.
//
// [Note: overlapping uses] Uses may overlap in any way: units inside units, or in backward a use
// that ends after the next has begun. Parameters are counted by their users, and none is released
// while it has one. What the plan releases or keeps is decided when a use begins and done when the
// last user has gone. Leaves are gathered whole: while one is open, uses of units inside it are
// nothing of their own.
//
// Errors: illegal moves (end of a use that did not begin, a step inside a use, gathers that are
// left over) are StateErrors with unit and parameter. After a failure release_all() still works.
//
// Threads: as Param: the step's thread or autograd on its behalf.
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
  // Ranks agree on every use also if no unit is dynamic: some may run out of data before others.
  bool uneven_data = false;
  static CoordinatorOptions from(const Config& config);
};

// What the coordinator works with; all of it outlives the coordinator.
struct CoordinatorParts {
  comm::Group& group;  // the ranks that parameters are cut over, by shard: what is gathered
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  Logger logger;
  GatherPhases phases = {};
  // All ranks that train the model, which may hold several copies of it: what they agree on. Null:
  // `group`.
  comm::Group* all_ranks = nullptr;
  // By rank of `group`, its rank there; empty: the same.
  std::vector<int> ranks_of_copy = {};
  // Of secondary shards (secondary_shards.h); null: there are none.
  comm::Group* secondary = nullptr;
  // What gathers bring is encoded with (encoded_shards.h), of the device's memory; null: shards are
  // gathered as they are.
  const comm::Codec* codec = nullptr;
};

// Where shards are offloaded and memory is planned.
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
  void add_external(UnitId unit, int param) { units_.add_param(unit, param); }
  // Before the first use. Throws ConfigError for a rule that matches no unit.
  void set_leaves(const LeafRule& rule) { units_.mark_leaves(rule, true); }
  void clear_leaves(const LeafRule& rule) { units_.mark_leaves(rule, false); }
  std::vector<std::string> leaves() const { return units_.leaves(); }
  void set_dynamic_gradients(DynamicGradients gradients) { gradients_ = std::move(gradients); }
  // What is inside leaves is known afterwards: no leaf is chosen any more.
  void expand_leaves() { units_.expand_leaves(); }
  // Before finalize(), which finds out from the parameters which shards are on NVMe.
  void set_tier(const TierOptions& tier);
  // Between steps, before shards are written from outside: gives back what is gathered, and drops
  // what was read or gathered ahead. At the same point on all ranks.
  void forget_copies();
  // Between steps, behind end_step(): gives back all that gathers, so that shards may move; then
  // gathers from where they are now. Traces are recorded anew.
  void drop_gathers();
  void change_tier(const TierOptions& tier);
  // The model is complete; the first use says it by itself. Afterwards the units' parameters are
  // final, those of leaves included.
  void finalize();

  std::size_t num_units() const { return units_.num_units(); }
  const UnitInfo& unit(UnitId unit) const { return units_[unit]; }
  const std::string& unit_name(UnitId unit) const { return units_[unit].name; }
  UnitReport report(UnitId unit) const;
  bool persists(int param) const;  // false before finalize()
  // A use of it would be nothing of its own now: a leaf around it is open.
  bool is_inside_open_leaf(UnitId unit) const;

  void begin_use(UnitId unit, Phase phase);
  // Throws ConfigError if one of the parameters was written to; the use has ended all the same.
  void end_use(UnitId unit, Phase phase);
  // Parameters for somebody who is no unit: gathered, waited for and readable until end_hold().
  // Collective, in the caller's order; not part of any trace. `what` is named in errors.
  void begin_hold(const std::vector<int>& params, const std::string& what);
  // `changed`: the shards are no longer those that were gathered; other copies are freed.
  void end_hold(const std::vector<int>& params, const std::string& what, bool changed);
  // Everything is gathered, if that fits into the live limit, and stays until end_resident(): for
  // many inferences between two steps. False: it does not fit, and nothing has changed. Collective.
  bool begin_resident();
  void end_resident();
  // It is resident, and not exact: units compute with what its wires were decoded to.
  bool is_decoded(int id) const;

  // Before shards are updated: it also waits until no dropped gather reads them any more.
  // Collective: where ranks need no consensus, the uses of the step are compared; the step fixes
  // the order. Where calls are work of streams it does not wait for the result, which
  // Group::wait_agreed() of all ranks throws. REQUIRES: no use is open; there, that this is called
  // before anything is updated.
  void end_step();
  // After shards are updated, or are not going to be.
  void start_ahead();
  // Before the memory of copies on the device (shard::DeviceCopy) is freed, which is done behind
  // the reduce stream. REQUIRES: the updates are done.
  void forget_device_copies();
  // After an exception: closes all uses, waits for what is in flight, releases everything but what
  // persists, and forgets this pass. The engine is usable afterwards.
  void release_all() noexcept;

  // Where ranks agree on each use (consensus.h); nothing to do where they do not.
  bool needs_consensus();
  void reach_consensus(ConsensusPoint point, std::string_view what = {});
  // For a rank without data: joins the others in what they use, up to their next point. kAllDone:
  // no rank has data any more.
  ConsensusPoint join();

  TraceMode trace_mode() const;
  CoordinatorStats take_stats();
  std::int64_t full_bytes() const;    // held now
  std::int64_t unused_bytes() const;  // of them, without a user
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
  bool has_gathers() const;  // somebody has shards that are not full parameters
  bool has_loads() const;
  std::vector<shard::Param*> params_of(const std::vector<int>& ids) const;

  void begin_static(const UnitInfo& unit, const Use& use);
  void begin_dynamic(const UnitInfo& unit, const Use& use);
  void open(const UnitInfo& unit, const OpenUse& use);
  void remove_users(std::span<shard::Param* const> params, const std::string& what, bool changed);
  // What is used in place: no list, no plan, no event.
  void attach(std::span<shard::Param* const> params);
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
  std::optional<Use> joined_;   // a use of the others that this rank takes part in
  int num_given_up_ = 0;        // passes, because of an exception
  std::string given_up_;        // the same in words, for comparisons; empty: none
  std::uint64_t num_uses_ = 0;  // since take_stats()

  // What is used in place.
  std::vector<std::uint64_t> seen_versions_;  // by parameter id: updates that were waited for
  std::int64_t own_bytes_ = 0;
  std::int64_t own_bytes_peak_ = 0;

  // From finalize() on, where something is gathered: several ranks, or shards elsewhere.
  std::unique_ptr<ShardLoader> own_loader_;
  ShardLoader* loader_ = nullptr;  // null: all shards are in the device's memory
  std::unique_ptr<SecondaryShards> secondary_;
  std::unique_ptr<EncodedShards> encoded_;
  std::unique_ptr<Gatherer> gatherer_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::unique_ptr<Consensus> consensus_;  // null: all ranks use the same units
};

}  // namespace tessera::coordinator
