// Decides which gathers are started ahead of their use, and what stays gathered when a use ends.
//
// It owns the trace book, the plans of known traces, the walk along the plan of the pass that runs,
// and the queue of prefetches that are planned and not started. A pass that matches no known trace
// has no walk: everything is gathered on demand, and only persistent parameters stay.
//
// A prefetch whose memory is still taken by an earlier use is held back until that use ends; at the
// latest it starts when the next use begins, so that the order of gathers depends on the begins of
// uses alone.
//
// A trace miss is a use that the trace does not expect. Unused gathers are dropped at once, and
// another known trace with the same beginning takes over, if there is one.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "tessera/coordinator/gatherer.h"
#include "tessera/coordinator/plan_walk.h"
#include "tessera/coordinator/prefetch_plan.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/coordinator/trace_book.h"
#include "tessera/coordinator/unit_table.h"
#include "tessera/core/log.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

struct PrefetcherOptions {
  PlanBudgets budgets;
  std::int64_t persist_param_bytes = 0;
  std::int64_t persist_model_bytes = 0;
  std::size_t max_traces = 32;
  // True: the arena was planned with all other memory and cannot be exceeded.
  bool has_fixed_arena = false;
  // True: the pass after one that is not ended by step() is started ahead. False where ranks agree
  // on each use: a rank that has joined the others learns of the end only with the next use.
  bool starts_next_pass = true;
};

class Prefetcher {
 public:
  // Everything here outlives the prefetcher.
  struct Parts {
    shard::ParamTable& params;
    const UnitTable& units;  // finalized
    Gatherer& gatherer;
    ShardLoader* loader;  // null: all shards are in the device's memory
    const Logger& logger;
  };
  Prefetcher(const Parts& parts, const PrefetcherOptions& options);

  // Call it before the parameters of a use are gathered. Starts prefetches that were held back,
  // also if this use is a trace miss, because other ranks may have had the memory to start them;
  // then follows the trace. `is_outermost`: no use is open. Returns its number in the pass.
  std::size_t follow_trace(const Use& use, bool is_outermost);
  // What the plan says about the use that was followed last; null: there is no plan.
  const PlannedUse* planned() const;
  // Call it once they are gathered: starts the prefetches of the plan, and reads ahead.
  void use_begun(const Use& use);
  // A forward or an inference.
  void note_end(std::size_t number) { book_.note_end(number); }
  // The memory of a use is free. `is_outermost`: no use is open any more.
  void use_ended(bool is_outermost);

  // True if the parameter stays gathered when no use needs it.
  bool stays(int param) const {
    return persists(param) || (walk_.has_value() && walk_->is_wanted(param));
  }
  std::vector<bool> what_stays(std::span<const int> besides = {}) const;
  bool persists(int param) const { return persists_[static_cast<std::size_t>(param)]; }
  void forget_persistent() { persists_.assign(persists_.size(), false); }

  // Starts the prefetches that were held back, whether their memory is free or not.
  void start_held_back() { start_queue(RoomCheck::kSkipped); }
  // Releases what was gathered ahead or is kept, if the limit does not hold `params` in addition.
  void make_room_for(std::span<const int> params);
  std::int64_t planned_bytes() const;  // of all parameters that are gathered

  // The pass ends by step(): releases everything.
  void end_step();
  // After the update: starts the gathers with which the next pass will begin, if that is predicted.
  void start_ahead();
  // An exception ended the pass, or parameters become resident.
  void forget_pass();

  Trace seen() const { return book_.seen(); }  // uses of this pass so far
  TraceMode mode() const { return book_.mode(); }
  Phase phase() const { return phase_; }  // of the use that the queue belongs to

 private:
  enum class RoomCheck : std::uint8_t { kHeeded, kSkipped };
  // A planned call that is not started yet.
  struct PlannedCall {
    const GatherList* params = nullptr;
    const OffsetList* offsets = nullptr;  // null: anywhere
  };

  void choose_what_persists();
  void log_what_cannot_be_prefetched() const;
  void end_pass();
  void handle_miss(const Use& use);
  void take_up_plan();
  void start_next_pass_if_foreseen();
  PlanInput plan_input(TraceId id) const;
  const PrefetchPlan& plan_of(TraceId id);
  void start_walk(TraceId id);
  void end_walk();
  void queue(const PlannedUse& planned);
  void start_queue(RoomCheck check);
  bool has_room_for(std::span<const int> params) const;
  void read_ahead();

  const Parts parts_;
  PrefetcherOptions options_;
  std::vector<std::vector<int>> unit_params_;
  std::vector<PlanParam> plan_params_;
  std::vector<bool> persists_;  // by parameter id

  TraceBook book_;
  std::map<TraceId, PrefetchPlan> plans_;
  std::optional<PlanWalk> walk_;
  TraceId walked_ = kNoTrace;        // trace whose plan the walk follows
  std::vector<GatherList> resumed_;  // calls of a plan that is followed from its middle
  std::vector<PlannedCall> queue_;   // held back from next_call_ on
  std::size_t next_call_ = 0;
  Phase phase_ = Phase::kForward;
  std::vector<int> ahead_ids_;  // ids of the last read_ahead()
};

}  // namespace tessera::coordinator
