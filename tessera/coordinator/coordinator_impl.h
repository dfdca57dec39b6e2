// Internal to coordinator: what its sources share. coordinator.cpp has uses and steps,
// coordinator_hold.cpp what is outside of uses, coordinator_passes.cpp plans and departures,
// coordinator_meet.cpp meetings.
//
// Threads: as Coordinator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/coordinator/coordinator.h"
#include "tessera/coordinator/gatherer.h"
#include "tessera/coordinator/meeting.h"
#include "tessera/coordinator/trace_book.h"
#include "tessera/coordinator/unit_table.h"

namespace tessera::coordinator {

class Coordinator::Impl {
 public:
  Impl(const CoordinatorParts& parts, const CoordinatorOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  UnitTable& units() { return units_; }
  void set_dynamic_gradients(DynamicGradients gradients) { gradients_ = std::move(gradients); }
  void set_tier(const TierOptions& tier);
  void seal();
  UnitReport report(UnitId id) const;
  bool persists(int param) const;
  bool is_inside_open_leaf(const UnitInfo& unit) const;

  void begin_use(UnitId id, Phase phase);
  void end_use(UnitId id, Phase phase);
  void begin_hold(const std::vector<int>& params, const std::string& what);
  void end_hold(const std::vector<int>& params, const std::string& what, bool changed);
  bool begin_resident();
  void end_resident();
  bool is_resident() const { return resident_; }
  void end_step();
  void start_ahead();
  void forget_device_copies();
  void abandon() noexcept;

  bool meets();
  void meet(MeetingPoint point, std::string_view what);
  MeetingPoint follow();

  TraceMode trace_mode() const { return book_.mode(); }
  CoordinatorStats take_stats();
  std::int64_t full_bytes() const { return own_bytes_ + (gatherer_ ? gatherer_->full_bytes() : 0); }
  std::int64_t unused_bytes() const;
  std::size_t num_calls_in_flight() const {
    return gatherer_ ? gatherer_->inflight().num_calls() : 0;
  }
  std::size_t arena_bytes() const { return gatherer_ ? gatherer_->arena_bytes() : 0; }

 private:
  enum class RoomCheck : std::uint8_t { kHeeded, kSkipped };
  enum class OpenKind : std::uint8_t { kStatic, kDynamic, kInsideLeaf, kResident };
  struct OpenUse {
    Use use;
    OpenKind kind = OpenKind::kStatic;
    std::size_t index = 0;  // in the pass
  };
  // A call of a plan that is still to be started.
  struct PlannedCall {
    const GatherList* params = nullptr;
    const OffsetList* offsets = nullptr;  // null: anywhere
  };

  static std::size_t index_of(const shard::Param& param) {
    return static_cast<std::size_t>(param.id());
  }
  std::string text_of(const Use& use) const;
  [[noreturn]] void throw_state(const std::string& message, const UnitInfo& unit) const;

  bool has_loads() const;
  void say_what_cannot_be_prefetched() const;

  // Uses.
  void begin_static(const UnitInfo& unit, const Use& use);
  void open(const UnitInfo& unit, const OpenUse& use);
  void gather(const UnitInfo& unit, const Use& use);
  void remove_users(std::span<shard::Param* const> params, const std::string& what, bool changed);
  void release_unwanted();
  void make_room_for(const std::vector<int>& params);
  void forget_stored_copies();

  // A group of one: a shard in memory is the parameter. No list, no plan, no event.
  void attach(std::span<shard::Param* const> params);
  void wait_for_update(const shard::Param& param);

  // Passes and plans.
  void follow_trace(const Use& use);
  void end_pass();
  void depart(const Use& use);
  void take_up_plan();
  void want_ahead(const PrefetchPlan& plan);
  void start_calls_ahead(const PrefetchPlan& plan);
  void start_next_pass_if_foreseen();
  device::Pending start_comparing_uses();
  PlanInput plan_input(const Trace& trace) const;
  const PrefetchPlan& plan_of(TraceId id);
  void queue_prefetches(const PlannedUse* planned);
  void start_prefetches(RoomCheck check);
  bool has_room_for(const GatherList& list) const;
  void read_ahead();

  // Meetings.
  Intent agree(const Intent& own);
  void gather_announced(const Meeting::Round& round);
  void begin_dynamic(const UnitInfo& unit, const Use& use);
  void check_same(const Meeting::Round& round) const;
  std::string text_of(const Intent& intent) const;
  void reduce_dynamic(const std::vector<bool>& flags);
  void end_followed_use();

  const CoordinatorParts parts_;
  CoordinatorOptions options_;
  std::optional<TierOptions> tier_;
  const bool is_alone_;
  UnitTable units_;
  device::Stream& compute_;

  TraceBook book_;
  std::vector<OpenUse> open_;  // in the order of their begins
  std::size_t num_static_open_ = 0;
  int num_given_up_ = 0;        // passes, because of an exception
  std::string given_up_;        // the same in words, for comparisons; empty: none
  std::uint64_t num_uses_ = 0;  // since take_stats()

  // Where something is gathered: several ranks, or stored shards.
  std::vector<bool> is_wanted_;  // by parameter id: stays when it has no user
  std::vector<bool> persists_;   // by parameter id
  std::vector<std::vector<int>> unit_params_;
  std::vector<std::string> unit_texts_;  // "h.3 (h.3.attn.weight)"
  std::vector<PlanParam> plan_params_;
  PlanBudgets plan_budgets_;
  std::map<TraceId, PrefetchPlan> plans_;
  const PrefetchPlan* plan_ = nullptr;  // of the trace that is followed
  TraceId ahead_of_ = kNoTrace;         // whose first gathers were started before its first use
  std::vector<int> ahead_ids_;          // of the last read_ahead()
  std::vector<GatherList> resumed_;     // calls of a plan that was taken up in its middle
  std::vector<PlannedCall> queue_;      // from next_call_ on: held back, see the note
  std::size_t next_call_ = 0;
  Use running_;  // the use that queue_ belongs to
  std::unique_ptr<ShardLoader> own_loader_;
  ShardLoader* loader_ = nullptr;  // null: all shards are in the device's memory
  std::unique_ptr<Gatherer> gatherer_;
  bool resident_ = false;
  std::uint64_t overflows_taken_ = 0;
  std::uint64_t misplaced_taken_ = 0;

  // Meetings.
  bool meets_ = false;
  DynamicGradients gradients_;
  std::vector<int> dynamic_params_;  // ids; their places are the flags of a meeting
  std::unique_ptr<Meeting> meeting_;
  std::optional<Use> followed_;
  std::uint64_t num_meetings_ = 0;

  // What is direct.
  std::vector<std::uint64_t> seen_versions_;  // by parameter id: updates that were waited for
  std::int64_t own_bytes_ = 0;
  std::int64_t own_bytes_peak_ = 0;
};

}  // namespace tessera::coordinator
