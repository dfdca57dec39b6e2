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
      slots_(static_cast<std::size_t>(parts.params.num_params())),
      counts_((num_units + 1) * kNumPhases) {}

GatherCounts& Gatherer::counts(UnitId unit, Phase phase) {
  const std::size_t row =
      unit < 0 ? counts_.size() / kNumPhases - 1 : static_cast<std::size_t>(unit);
  return counts_[row * kNumPhases + static_cast<std::size_t>(phase)];
}

void Gatherer::Call::clear() {
  members.clear();
  ids.clear();
  tensors.clear();
  loads.clear();
  ready.clear();
  scratch.clear();
  last_update = nullptr;
  bytes = 0;
}

void Gatherer::start(std::span<const int> ids, std::span<const std::int64_t> offsets,
                     const std::string& unit, const Cause& cause) {
  start_call(From::kShards, ids, offsets, {}, unit, cause);
  if (parts_.secondary != nullptr) {
    start_call(From::kSecondary, ids, offsets, {}, unit, cause);
  }
}

void Gatherer::start_to(std::span<const int> ids, std::span<const std::uint8_t> wants,
                        const std::string& unit, const Cause& cause) {
  start_call(From::kShards, ids, {}, wants, unit, cause);
}

bool Gatherer::reads_shard(const Param& param) const {
  const bool is_encoded = parts_.encoded != nullptr && parts_.encoded->has(param);
  return !is_encoded && comes_from(From::kShards, param, {});
}

bool Gatherer::comes_from(From from, const Param& param, const Cause& cause) const {
  // Where gathers are quantised so is what secondary shards were made of.
  const bool is_exact = cause.exact && parts_.encoded != nullptr;
  const bool has_secondary =
      !is_exact && parts_.secondary != nullptr && parts_.secondary->has(param);
  return has_secondary == (from == From::kSecondary);
}

void Gatherer::start_call(From from, std::span<const int> ids,
                          std::span<const std::int64_t> offsets,
                          std::span<const std::uint8_t> wants, const std::string& unit,
                          const Cause& cause) {
  const bool is_for_some = !wants.empty();
  const bool is_wanted = !is_for_some || wants[static_cast<std::size_t>(parts_.group.rank())] != 0;
  call_.clear();
  std::vector<device::ArenaBlock> unneeded;
  std::vector<Pending> gathered;
  std::int64_t begin_ns = 0;
  try {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Param& param = parts_.params[ids[i]];
      const bool is_released = param.state() == ParamState::kReleased && !param.shard_is_full();
      if (!is_for_some && (!is_released || !comes_from(from, param, cause))) {
        continue;
      }
      if (call_.tensors.empty()) {
        wait_for_calls_below(max_inflight_);
      }
      const shard::Layout& layout = param.layout();
      if (from == From::kSecondary) {
        take(param, i < offsets.size() ? offsets[i] : -1);
        add_secondary(param);
        continue;
      }
      const auto put = is_encoded(param, cause) ? &Gatherer::add_encoded : &Gatherer::add;
      if (is_wanted && is_released) {
        take(param, i < offsets.size() ? offsets[i] : -1);
        (this->*put)(param, param.full(), nullptr);
        if (parts_.secondary != nullptr && !is_for_some && call_.tensors.back().codec != nullptr) {
          keep_wires(param);
        }
      } else if (is_wanted) {  // the others send it all the same
        unneeded.push_back(arena_.allocate(param.gathered_bytes(), gather_));
        (this->*put)(param, unneeded.back().data, nullptr);
      } else if (param.tier() != Tier::kDevice) {  // only others get it
        unneeded.push_back(arena_.allocate(layout.shard_bytes(), gather_));
        (this->*put)(param, nullptr, unneeded.back().data);
      } else {
        (this->*put)(param, nullptr, nullptr);
      }
    }
    if (call_.tensors.empty()) {
      return;
    }
    log_call(unit, !is_wanted                        ? "for other ranks"
                   : is_for_some                     ? "on demand, to some ranks"
                   : cause.reason == Reason::kDemand ? "on demand"
                                                     : "ahead");
    begin_ns = parts_.clock.now_ns();
    if (is_for_some) {
      gathered = {
          parts_.group.start_gather_to(call_.tensors, wants, call_options(unit, ids, cause))};
    } else if (from == From::kShards && parts_.group.size() == 1) {
      gathered = start_alone(unit, cause);
    } else {
      gathered = start_gathers(from, unit, cause);
    }
  } catch (...) {
    undo_call();
    for (device::ArenaBlock& block : unneeded) {
      arena_.release(std::move(block), Pending());
    }
    throw;
  }
  for (device::ArenaBlock& block : unneeded) {
    arena_.release(std::move(block), gathered.front());
  }
  if (call_.members.empty()) {
    drops_.push_back(gathered.front());  // our shards are read until then
  }
  if (parts_.secondary != nullptr && !is_for_some) {
    for (std::size_t i = 0; i < call_.members.size(); ++i) {
      if (from == From::kSecondary || call_.tensors[i].kept.num > 0) {
        parts_.secondary->set_in_flight(*call_.members[i], gathered[gathered.size() == 1 ? 0 : i]);
      }
    }
  }
  note_call(std::move(gathered), begin_ns, cause, !is_for_some);
}

void Gatherer::take(Param& param, std::int64_t offset) {
  const std::size_t bytes = param.gathered_bytes();
  device::ArenaBlock& block = slot_of(param).block;
  if (offset >= 0 && arena_.can_allocate_at(static_cast<std::size_t>(offset), bytes)) {
    block = arena_.allocate_at(static_cast<std::size_t>(offset), bytes, gather_);
  } else {
    num_misplaced_ += offset >= 0 ? 1 : 0;
    block = arena_.allocate(bytes, gather_);
  }
  param.start_gather(block.data);
  full_bytes_ += full_bytes_of(param);
  note_peak();
  call_.members.push_back(&param);
  call_.ids.push_back(param.id());
  call_.bytes += param.layout().full_bytes();
}

void Gatherer::add_secondary(const Param& param) {
  SecondaryShards& secondary = *parts_.secondary;
  std::byte* scratch = nullptr;
  if (const std::size_t bytes = secondary.scratch_bytes(param); bytes > 0) {
    call_.scratch.push_back(arena_.allocate(bytes, gather_));
    scratch = call_.scratch.back().data;
  }
  call_.tensors.push_back(secondary.start_gather(param, param.full(), scratch, gather_));
  secondary_bytes_ += param.layout().full_bytes();
  secondary_wire_bytes_ += secondary.bytes_of_all(param);
}

void Gatherer::keep_wires(const Param& param) {
  comm::Gather& tensor = call_.tensors.back();
  tensor.kept = parts_.secondary->wires_to_keep(param, *tensor.codec);
  if (const Pending& reader = parts_.secondary->in_flight(param);
      tensor.kept.num > 0 && !reader.done()) {
    call_.ready.push_back(reader);
  }
}

std::byte* Gatherer::load_shard(const Param& param, void* full, std::byte* scratch) {
  const shard::Layout& layout = param.layout();
  std::byte* const to =
      full == nullptr ? scratch
                      : static_cast<std::byte*>(full) + layout.load_offset(parts_.group.rank());
  // Behind the former users of the memory, which the gather stream waits for.
  const bool is_decoded = parts_.group.size() == 1 && layout.is_encoded();
  // The second of two phases may order the gather stream after the first, which needs this load.
  const auto late =
      parts_.phases.across != nullptr ? device::StreamKind::kRead : device::StreamKind::kGather;
  call_.loads.push_back(
      parts_.loader->start_load(param, to, gather_.record(), is_decoded ? full : nullptr, late));
  return to;
}

void Gatherer::add_encoded(const Param& param, void* full, std::byte* scratch) {
  EncodedShards& encoded = *parts_.encoded;
  if (!encoded.has(param)) {
    const bool is_loaded = param.tier() != Tier::kDevice;
    const std::byte* const shard = is_loaded ? load_shard(param, full, scratch) : param.shard();
    encoded.start_encode(param, shard, is_loaded ? call_.loads.back() : param.updated());
  }
  call_.ready.push_back(encoded.made(param));
  call_.tensors.push_back(encoded.gather(param, full));
  if (full != nullptr) {
    encoded_bytes_ += param.layout().full_bytes();
    wire_bytes_ += encoded.wire_bytes(param) * static_cast<std::size_t>(parts_.group.size());
  }
}

void Gatherer::add(const Param& param, void* full, std::byte* scratch) {
  const shard::Layout& layout = param.layout();
  order_behind_update(param);
  const std::byte* shard = param.shard();
  if (param.tier() != Tier::kDevice) {
    shard = load_shard(param, full, scratch);
  }
  call_.tensors.push_back(
      {shard, full, layout.shard_numel(), layout.dtype(), param.name(), param.codec()});
  if (full != nullptr && layout.is_encoded()) {
    encoded_bytes_ += layout.full_bytes();
    wire_bytes_ += layout.shard_bytes() * static_cast<std::size_t>(parts_.group.size());
  }
}

std::vector<Pending> Gatherer::start_alone(const std::string& unit, const Cause& cause) {
  std::vector<comm::Gather> encoded;
  for (std::size_t i = 0; i < call_.tensors.size(); ++i) {
    if (call_.members[i]->tier() == Tier::kDevice) {
      encoded.push_back(call_.tensors[i]);
    }
  }
  Pending decoded;
  if (!encoded.empty()) {
    comm::CallOptions options = call_options(unit, call_.ids, cause);
    options.ready = Pending::all(call_.ready);
    decoded = parts_.group.start_all_gather(encoded, options);
  }
  std::vector<Pending> gathered;
  std::size_t num_loads = 0;
  for (const Param* member : call_.members) {
    gathered.push_back(member->tier() == Tier::kDevice ? decoded : call_.loads[num_loads++]);
  }
  return gathered;
}

std::vector<Pending> Gatherer::start_gathers(From from, const std::string& unit,
                                             const Cause& cause) {
  comm::CallOptions options = call_options(unit, call_.ids, cause);
  if (from == From::kSecondary) {
    options.content_hash ^= parts_.secondary->hash_of_versions(call_.ids);
    return parts_.secondary->group().start_all_gathers(call_.tensors, options);
  }
  if (parts_.phases.across == nullptr) {
    return parts_.group.start_all_gathers(call_.tensors, options);
  }
  comm::Group& inside = *parts_.phases.inside;
  const auto block = static_cast<std::size_t>(inside.rank());
  std::vector<comm::Gather> blocks = call_.tensors;  // what the first phase brings
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    comm::Gather& tensor = blocks[i];
    comm::Gather& whole = call_.tensors[i];
    if (whole.codec != nullptr) {
      const std::size_t wire_bytes = whole.codec->wire_bytes(whole.shard_numel);
      whole.wires_per_rank = parts_.phases.across->size();
      call_.scratch.push_back(
          arena_.allocate(wire_bytes * static_cast<std::size_t>(whole.wires_per_rank), gather_));
      tensor = {whole.shard, call_.scratch.back().data, static_cast<std::int64_t>(wire_bytes),
                DType::kUInt8, whole.name};
      whole.shard = tensor.full;
      continue;
    }
    whole.shard_numel *= parts_.phases.across->size();
    tensor.full = static_cast<std::byte*>(whole.full) +
                  block * static_cast<std::size_t>(whole.shard_numel) * bytes_of(whole.dtype);
    whole.shard = tensor.full;
  }
  options.ready = Pending::all(parts_.phases.across->start_all_gathers(blocks, options));
  return inside.start_all_gathers(call_.tensors, options);
}

void Gatherer::undo_call() {
  for (const std::vector<Pending>* all : {&call_.loads, &call_.ready}) {  // they write or read it
    for (const Pending& each : *all) {
      wait_ignoring_failure(each);
    }
  }
  for (Param* param : call_.members) {  // without a call they would look as if they were there
    param->drop();
    free_block(*param, Pending());
  }
  for (device::ArenaBlock& block : call_.scratch) {
    arena_.release(std::move(block), Pending());
  }
  call_.scratch.clear();
}

void Gatherer::note_call(std::vector<Pending> gathered, std::int64_t begin_ns, const Cause& cause,
                         bool by_all) {
  const double submit_s = static_cast<double>(parts_.clock.now_ns() - begin_ns) * 1e-9;
  for (std::size_t i = 0; i < call_.members.size(); ++i) {
    Slot& slot = slot_of(*call_.members[i]);
    slot.gathered = gathered[gathered.size() == 1 ? 0 : i];
    slot.cause = cause;
    slot.by_all = by_all;
  }
  calls_.push_back({std::move(gathered), std::exchange(call_.scratch, {})});
  GatherCounts& counts = this->counts(cause.unit, cause.phase);
  if (cause.reason == Reason::kDemand) {
    counts.misses += call_.members.size();
    ++counts.demand_calls;
    counts.demand_bytes += call_.bytes;
    counts.demand_submit_s += submit_s;
  } else {
    ++counts.prefetch_calls;
    counts.prefetch_bytes += call_.bytes;
    counts.prefetch_submit_s += submit_s;
  }
}

void Gatherer::order_behind_update(const Param& param) {
  // Parameters of one update share its Pending.
  const device::PendingState* update = param.updated().state().get();
  if (update == nullptr || update == call_.last_update || param.tier() != Tier::kDevice) {
    return;
  }
  if (gather_.can_order_behind(param.updated())) {
    gather_.wait(param.updated());
  } else {
    call_.ready.push_back(param.updated());  // the group waits for it, and the host goes on
  }
  call_.last_update = update;
}

comm::CallOptions Gatherer::call_options(const std::string& unit, std::span<const int> ids,
                                         const Cause& cause) const {
  comm::CallOptions options;
  options.label = {
      unit, ids.empty() ? std::string_view() : std::string_view(parts_.params[ids.front()].name())};
  options.content_hash = comm::hash_bytes(ids.data(), ids.size_bytes(), 0);
  if (parts_.encoded != nullptr && !cause.exact) {
    options.content_hash ^= parts_.encoded->hash_of_versions(ids);
  }
  options.stream = &gather_;
  std::vector<Pending> ready = call_.ready;
  ready.insert(ready.end(), call_.loads.begin(), call_.loads.end());
  options.ready = Pending::all(std::move(ready));
  return options;
}

void Gatherer::log_call(const std::string& unit, const char* how) const {
  if (!parts_.logger.enabled(LogLevel::kTrace)) {
    return;
  }
  std::string names;
  for (const Param* param : call_.members) {
    names += (names.empty() ? "" : ", ") + param->name();
  }
  parts_.logger.trace("gather ", how, " for unit '", unit, "': ", names);
}

void Gatherer::forget_done_calls() {
  std::erase_if(calls_, [this](InFlight& call) {
    const bool is_done = std::all_of(call.gathered.begin(), call.gathered.end(),
                                     [](const Pending& part) { return part.done(); });
    if (is_done) {
      forget(call);
    }
    return is_done;
  });
}

// A failure is told to those who wait for the parameters, and is not that of the memory.
void Gatherer::forget(InFlight& call) {
  for (device::ArenaBlock& block : call.scratch) {
    for (const Pending& part : call.gathered) {
      wait_ignoring_failure(part);
    }
    arena_.release(std::move(block), Pending());
  }
  call.scratch.clear();
}

std::size_t Gatherer::num_calls() {
  forget_done_calls();
  return calls_.size();
}

// What a call failed with is told to those who wait for its parameters.
void Gatherer::wait_for_calls_below(std::size_t limit) {
  forget_done_calls();
  while (calls_.size() >= limit && !calls_.empty()) {
    for (const Pending& part : calls_.front().gathered) {
      wait_ignoring_failure(part);
    }
    forget(calls_.front());
    calls_.pop_front();
  }
}

void Gatherer::finish(std::span<Param* const> params, LabelId label, const Cause& user) {
  const device::PendingState* waited_for = nullptr;
  for (Param* param : params) {
    if (param->state() != ParamState::kGathering) {
      continue;
    }
    Slot& slot = slot_of(*param);
    const bool was_prefetched = slot.cause.reason == Reason::kPrefetch;
    GatherCounts& counts = this->counts(user.unit, user.phase);
    if (slot.gathered.state().get() != waited_for || waited_for == nullptr) {
      waited_for = slot.gathered.state().get();
      (was_prefetched ? counts.prefetch_wait_s : counts.demand_wait_s) +=
          wait(slot.gathered, label);
      if (parts_.logger.enabled(LogLevel::kTrace)) {
        parts_.logger.trace("waited for '", param->name(), "', gathered ",
                            was_prefetched ? "ahead" : "on demand");
      }
    }
    counts.hits += was_prefetched ? 1 : 0;
    slot.gathered = {};
    param->finish_gather();
    if (parts_.secondary != nullptr) {
      parts_.secondary->keep(*param, slot.by_all && !is_exact_for_once(*param));
    }
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
  free_block(param, parts_.secondary == nullptr ? last_use
                                                : parts_.secondary->with_copies(param, last_use));
}

void Gatherer::release_idle(const std::vector<bool>& stays) {
  const Pending computed = this->computed();
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    Param& param = parts_.params[id];
    // What is used in place goes with its use; one that is about to begin has no user yet.
    if (stays[static_cast<std::size_t>(id)] || param.num_users() > 0 || param.shard_is_full()) {
      continue;
    }
    if (param.state() == ParamState::kGathering) {
      drop(param);
    } else if (param.state() == ParamState::kAvailable) {
      release(param, computed);
    }
  }
}

bool Gatherer::is_exact_for_once(const Param& param) const {
  return is_encoded(param) && slots_[static_cast<std::size_t>(param.id())].cause.exact;
}

void Gatherer::release_quantised(std::span<const int> ids) {
  if (parts_.encoded == nullptr) {
    return;
  }
  std::vector<bool> stays(slots_.size(), true);
  for (const int id : ids) {
    const Param& param = parts_.params[id];
    stays[static_cast<std::size_t>(id)] = !is_encoded(param) || is_exact_for_once(param);
  }
  release_idle(stays);
}

void Gatherer::drop(Param& param) {
  Slot& slot = slot_of(param);
  const Pending gathered = std::exchange(slot.gathered, {});
  param.drop();
  if (slot.cause.reason == Reason::kPrefetch) {
    ++counts(slot.cause.unit, slot.cause.phase).drops;
  }
  if (parts_.logger.enabled(LogLevel::kTrace)) {
    parts_.logger.trace("drop '", param.name(), "', gathered in vain");
  }
  if (!gathered.done()) {
    drops_.push_back(gathered);
  }
  // Ranks that share a failed gather are done for; one alone goes on.
  free_block(param,
             parts_.group.size() > 1 ? gathered : Pending(std::make_shared<EndOf>(gathered)));
}

void Gatherer::free_block(const Param& param, const Pending& last_use) {
  full_bytes_ -= full_bytes_of(param);
  arena_.release(std::exchange(slot_of(param).block, {}), last_use);
}

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

void Gatherer::abandon(const std::vector<bool>& stays) noexcept {
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    Param& param = parts_.params[id];
    if (param.state() == ParamState::kGathering && !param.shard_is_full()) {
      wait_ignoring_failure(slot_of(param).gathered);
      drop(param);
    }
  }
  release_idle(stays);
  wait_for_loads();
  for (const Pending& gathered : drops_) {
    wait_ignoring_failure(gathered);
  }
  drops_.clear();
  if (parts_.encoded != nullptr) {
    parts_.encoded->forget_failures();
  }
}

void Gatherer::take_stats(CoordinatorStats& stats) {
  GatherCounts* const phases[kNumPhases] = {&stats.forward, &stats.backward, &stats.inference};
  GatherCounts all;
  for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
    for (std::size_t i = phase; i < counts_.size(); i += kNumPhases) {
      *phases[phase] += counts_[i];
    }
    const GatherCounts total = *phases[phase];
    all += *phases[phase] -= std::exchange(taken_[phase], total);
  }
  stats.prefetch_hits = all.hits;
  stats.prefetch_misses = all.misses;
  stats.prefetch_drops = all.drops;
  stats.num_gathers = all.demand_calls + all.prefetch_calls;
  stats.gathered_bytes = all.demand_bytes + all.prefetch_bytes;
  stats.exposed_wait_s = all.demand_wait_s + all.prefetch_wait_s;
  stats.full_bytes_peak = std::exchange(full_bytes_peak_, full_bytes_ + in_place_bytes_);
  const std::uint64_t overflows = arena_.stats().num_overflows;
  stats.arena_overflows = overflows - std::exchange(overflows_taken_, overflows);
  stats.arena_misplaced = std::exchange(num_misplaced_, 0);
  stats.secondary_bytes = std::exchange(secondary_bytes_, 0);
  stats.secondary_wire_bytes = std::exchange(secondary_wire_bytes_, 0);
  stats.encoded_bytes = std::exchange(encoded_bytes_, 0);
  stats.wire_bytes = std::exchange(wire_bytes_, 0);
  if (parts_.loader != nullptr) {
    stats.brought_bytes = parts_.loader->take_stats(Tier::kHost).loaded_bytes;
  }
  if (parts_.secondary != nullptr) {
    stats.brought_bytes += parts_.secondary->take_brought_bytes();
    stats.kept_bytes = parts_.secondary->take_kept_bytes();
  }
}

}  // namespace tessera::coordinator
