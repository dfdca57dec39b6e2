#include "tessera/coordinator/gatherer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "tessera/coordinator/unit_table.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;
using shard::ParamState;

namespace {

// Done when `work` is, also if that has failed: whoever waits for the parameter is told, and others
// may have its memory.
class EndOf final : public device::PendingState {
 public:
  explicit EndOf(Pending work) : work_(std::move(work)) {}
  bool done() override { return work_.done(); }
  void wait() override { wait_ignoring_failure(work_); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    try {
      return work_.wait_for(limit);
    } catch (...) {
      return true;
    }
  }

 private:
  const Pending work_;
};

}  // namespace

Gatherer::Gatherer(const Parts& parts, std::size_t num_units, std::size_t arena_bytes,
                   int max_inflight)
    : parts_(parts),
      compute_(parts.device.stream(device::StreamKind::kCompute)),
      gather_(parts.device.stream(device::StreamKind::kGather)),
      arena_bytes_(arena_bytes),
      max_inflight_(static_cast<std::size_t>(max_inflight)),
      arena_(parts.device, arena_bytes),
      inflight_(static_cast<std::size_t>(parts.params.num_params())),
      blocks_(static_cast<std::size_t>(parts.params.num_params())),
      counts_((num_units + 1) * kNumPhases) {}

GatherCounts& Gatherer::counts(UnitId unit, Phase phase) {
  const std::size_t row =
      unit < 0 ? counts_.size() / kNumPhases - 1 : static_cast<std::size_t>(unit);
  return counts_[row * kNumPhases + static_cast<std::size_t>(phase)];
}

GatherCounts Gatherer::take_counts(Phase phase) {
  GatherCounts all;
  for (std::size_t i = static_cast<std::size_t>(phase); i < counts_.size(); i += kNumPhases) {
    all += counts_[i];
  }
  GatherCounts& taken = taken_[static_cast<std::size_t>(phase)];
  return all - std::exchange(taken, all);
}

void Gatherer::start(std::span<const int> ids, std::span<const std::int64_t> offsets,
                     const std::string& unit, const Cause& cause) {
  members_.clear();
  member_ids_.clear();
  tensors_.clear();
  ready_.clear();
  last_update_ = nullptr;
  std::uint64_t bytes = 0;
  std::vector<Pending> gathered;
  double submit_s = 0;
  try {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Param& param = parts_.params[ids[i]];
      if (param.state() != ParamState::kReleased || param.shard_is_full()) {
        continue;
      }
      if (members_.empty()) {
        inflight_.wait_for_calls_below(max_inflight_);
      }
      order_behind_update(param);
      take(param, i < offsets.size() ? offsets[i] : -1);
      members_.push_back(&param);
      member_ids_.push_back(ids[i]);
      bytes += param.layout().full_bytes();
      tensors_.push_back({shard_of(param, own_slot(param, param.full())), param.full(),
                          param.layout().shard_numel(), param.layout().dtype(), param.name()});
    }
    if (members_.empty()) {
      return;
    }
    full_bytes_peak_ = std::max(full_bytes_peak_, full_bytes_);
    log_call(unit, cause.reason == Reason::kDemand ? "on demand" : "ahead");
    const std::int64_t begin_ns = parts_.clock.now_ns();
    gathered = parts_.group.size() == 1
                   ? ready_
                   : parts_.group.start_all_gathers(tensors_, call_options(unit, member_ids_));
    submit_s = static_cast<double>(parts_.clock.now_ns() - begin_ns) * 1e-9;
  } catch (...) {
    undo_call();
    throw;
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    inflight_.add(*members_[i], {gathered[i], cause});
  }
  inflight_.add_call(std::move(gathered));

  GatherCounts& counts = this->counts(cause.unit, cause.phase);
  if (cause.reason == Reason::kDemand) {
    counts.misses += members_.size();
    ++counts.demand_calls;
    counts.demand_bytes += bytes;
    counts.demand_submit_s += submit_s;
  } else {
    ++counts.prefetch_calls;
    counts.prefetch_bytes += bytes;
    counts.prefetch_submit_s += submit_s;
  }
}

void Gatherer::undo_call() {
  for (const Pending& brought : ready_) {
    wait_ignoring_failure(brought);
  }
  for (Param* param : members_) {  // without a call they would look as if they were there
    param->drop();
    give_back(*param, Pending());
  }
}

void Gatherer::start_to(std::span<const int> ids, std::span<const std::uint8_t> wants,
                        const std::string& unit, const Cause& cause) {
  const bool is_wanted = wants[static_cast<std::size_t>(parts_.group.rank())] != 0;
  inflight_.wait_for_calls_below(max_inflight_);
  members_.clear();
  tensors_.clear();
  ready_.clear();
  last_update_ = nullptr;
  std::vector<device::ArenaBlock> unneeded;
  std::uint64_t bytes = 0;
  Pending gathered;
  GatherCounts& counts = this->counts(cause.unit, cause.phase);
  try {
    for (const int id : ids) {
      Param& param = parts_.params[id];
      order_behind_update(param);
      const shard::Layout& layout = param.layout();
      void* full = nullptr;
      if (is_wanted && param.state() == ParamState::kReleased) {
        take(param, -1);
        full = param.full();
        members_.push_back(&param);
        bytes += layout.full_bytes();
      } else if (is_wanted) {  // the others send it all the same
        unneeded.push_back(arena_.allocate(layout.full_bytes(), gather_));
        full = unneeded.back().data;
      }
      std::byte* slot = own_slot(param, full);
      if (param.tier() != Tier::kDevice && full == nullptr) {  // only others get it
        unneeded.push_back(arena_.allocate(layout.shard_bytes(), gather_));
        slot = unneeded.back().data;
      }
      tensors_.push_back(
          {shard_of(param, slot), full, layout.shard_numel(), layout.dtype(), param.name()});
    }
    full_bytes_peak_ = std::max(full_bytes_peak_, full_bytes_);
    log_call(unit, is_wanted ? "on demand, to some ranks" : "for other ranks");
    const std::int64_t begin_ns = parts_.clock.now_ns();
    gathered = parts_.group.start_gather_to(tensors_, wants, call_options(unit, ids));
    counts.demand_submit_s += static_cast<double>(parts_.clock.now_ns() - begin_ns) * 1e-9;
  } catch (...) {
    undo_call();
    for (device::ArenaBlock& block : unneeded) {
      arena_.release(std::move(block), Pending());
    }
    throw;
  }
  ++counts.demand_calls;
  counts.demand_bytes += bytes;
  for (Param* param : members_) {
    inflight_.add(*param, {gathered, cause});
  }
  inflight_.add_call({gathered});
  for (device::ArenaBlock& block : unneeded) {
    arena_.release(std::move(block), gathered);
  }
  counts.misses += members_.size();
  if (members_.empty()) {
    drops_.push_back(gathered);  // our shards are read until then
  }
}

void Gatherer::order_behind_update(const Param& param) {
  // Parameters of one update share its Pending.
  const device::PendingState* update = param.updated().state().get();
  const bool is_brought = param.tier() != Tier::kDevice;
  if (update == nullptr || update == last_update_ || is_brought) {
    return;
  }
  if (compute_.runs_on_caller() && !param.updated().done()) {
    ready_.push_back(param.updated());  // the host goes on
  } else {
    gather_.wait(param.updated());
  }
  last_update_ = update;
}

std::byte* Gatherer::own_slot(const Param& param, void* full) const {
  return full == nullptr
             ? nullptr
             : static_cast<std::byte*>(full) +
                   static_cast<std::size_t>(parts_.group.rank()) * param.layout().shard_bytes();
}

const std::byte* Gatherer::shard_of(const Param& param, std::byte* slot) {
  if (param.tier() == Tier::kDevice) {
    return param.shard();
  }
  // Behind the former users of the slot's memory, which the gather stream waits for.
  ready_.push_back(parts_.loader->start_load(param, slot, gather_.record()));
  return slot;
}

comm::CallOptions Gatherer::call_options(const std::string& unit, std::span<const int> ids) const {
  comm::CallOptions options;
  options.label = {
      unit, ids.empty() ? std::string_view() : std::string_view(parts_.params[ids.front()].name())};
  options.content_hash = comm::hash_bytes(ids.data(), ids.size_bytes(), 0);
  options.stream = &gather_;
  options.ready = Pending::all(ready_);
  return options;
}

void Gatherer::log_call(const std::string& unit, const char* how) const {
  if (!parts_.logger.enabled(LogLevel::kTrace)) {
    return;
  }
  std::string names;
  for (const Param* param : members_) {
    names += (names.empty() ? "" : ", ") + param->name();
  }
  parts_.logger.trace("gather ", how, " for unit '", unit, "': ", names);
}

void Gatherer::take(Param& param, std::int64_t offset) {
  const std::size_t bytes = param.layout().full_bytes();
  device::ArenaBlock& block = blocks_[static_cast<std::size_t>(param.id())];
  if (offset >= 0 && arena_.can_allocate_at(static_cast<std::size_t>(offset), bytes)) {
    block = arena_.allocate_at(static_cast<std::size_t>(offset), bytes, gather_);
  } else {
    num_misplaced_ += offset >= 0 ? 1 : 0;
    block = arena_.allocate(bytes, gather_);
  }
  param.start_gather(block.data);
  full_bytes_ += full_bytes_of(param);
}

void Gatherer::finish(std::span<Param* const> params, LabelId label, const Cause& user) {
  const device::PendingState* waited_for = nullptr;
  for (Param* param : params) {
    if (param->state() != ParamState::kGathering) {
      continue;
    }
    const InflightRegistry::Entry& entry = inflight_[*param];
    const bool was_prefetched = entry.cause.reason == Reason::kPrefetch;
    GatherCounts& counts = this->counts(user.unit, user.phase);
    if (entry.gathered.state().get() != waited_for || waited_for == nullptr) {
      waited_for = entry.gathered.state().get();
      (was_prefetched ? counts.prefetch_wait_s : counts.demand_wait_s) +=
          wait(entry.gathered, label);
      if (parts_.logger.enabled(LogLevel::kTrace)) {
        parts_.logger.trace("waited for '", param->name(), "', gathered ",
                            was_prefetched ? "ahead" : "on demand");
      }
    }
    counts.hits += was_prefetched ? 1 : 0;
    inflight_.take(*param);
    param->finish_gather();
  }
}

double Gatherer::wait(const Pending& gathered, LabelId unit) {
  const bool is_late = !gathered.done();
  const std::int64_t start_ns = is_late ? parts_.clock.now_ns() : 0;
  // Without a stream of its own the compute stream is this thread: waiting here is the same, and
  // a failure is thrown where it is known which unit is to blame, not kept in the stream.
  if (compute_.runs_on_caller()) {
    gathered.wait();
  } else {
    compute_.wait(gathered);
    if (gathered.done()) {
      gathered.wait();
    }
  }
  if (!is_late) {
    return 0;
  }
  const std::int64_t end_ns = parts_.clock.now_ns();
  if (parts_.spans.enabled()) {
    SpanArgs args;
    args.unit = unit;
    parts_.spans.record("wait for gather", start_ns, end_ns, args);
  }
  return static_cast<double>(end_ns - start_ns) * 1e-9;
}

void Gatherer::release(Param& param, const Pending& last_use) {
  param.release();
  if (parts_.logger.enabled(LogLevel::kTrace)) {
    parts_.logger.trace("release '", param.name(), "'");
  }
  give_back(param, last_use);
}

void Gatherer::drop(Param& param) {
  const InflightRegistry::Entry entry = inflight_.take(param);
  param.drop();
  if (entry.cause.reason == Reason::kPrefetch) {
    ++counts(entry.cause.unit, entry.cause.phase).drops;
  }
  if (parts_.logger.enabled(LogLevel::kTrace)) {
    parts_.logger.trace("drop '", param.name(), "', gathered in vain");
  }
  if (!entry.gathered.done()) {
    drops_.push_back(entry.gathered);
  }
  // Ranks that share a failed gather are done for; one alone goes on.
  give_back(param, parts_.group.size() > 1 ? entry.gathered
                                           : Pending(std::make_shared<EndOf>(entry.gathered)));
}

void Gatherer::give_back(const Param& param, const Pending& last_use) {
  full_bytes_ -= full_bytes_of(param);
  arena_.release(std::exchange(blocks_[static_cast<std::size_t>(param.id())], {}), last_use);
}

Pending Gatherer::computed() { return compute_.record(); }

void Gatherer::wait_for_drops() {
  for (const Pending& gathered : drops_) {
    if (compute_.runs_on_caller()) {
      gathered.wait();
    } else {
      compute_.wait(gathered);
    }
  }
  drops_.clear();
}

void Gatherer::finish_and_drop(Param& param) {
  wait_ignoring_failure(inflight_[param].gathered);
  drop(param);
}

void Gatherer::finish_drops() noexcept {
  wait_for_loads();
  for (const Pending& gathered : drops_) {
    wait_ignoring_failure(gathered);
  }
  drops_.clear();
}

std::int64_t Gatherer::take_peak() { return std::exchange(full_bytes_peak_, full_bytes_); }

}  // namespace tessera::coordinator
