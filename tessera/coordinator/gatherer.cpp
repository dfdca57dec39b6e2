#include "tessera/coordinator/gatherer.h"

#include <algorithm>
#include <utility>

#include "tessera/coordinator/unit_table.h"

namespace tessera::coordinator {
namespace {

using device::Pending;
using shard::Param;
using shard::ParamState;

void wait_ignoring_failure(const Pending& pending) noexcept {
  try {
    pending.wait();
  } catch (...) {  // whoever recovers has been told already; here only the end matters
  }
}

}  // namespace

Gatherer::Gatherer(const Parts& parts, std::size_t arena_bytes)
    : parts_(parts),
      compute_(parts.device.stream(device::StreamKind::kCompute)),
      gather_(parts.device.stream(device::StreamKind::kGather)),
      arena_bytes_(arena_bytes),
      arena_(parts.device, arena_bytes),
      slots_(static_cast<std::size_t>(parts.params.num_params())) {}

void Gatherer::start(std::span<const int> ids, const std::string& unit, Reason reason) {
  members_.clear();
  tensors_.clear();
  try {
    const device::PendingState* waited_for = nullptr;
    for (const int id : ids) {
      Param& param = parts_.params[id];
      if (param.state() != ParamState::kReleased) {
        continue;
      }
      // Parameters of one update share its Pending.
      const device::PendingState* update = param.updated().state().get();
      if (update != nullptr && update != waited_for) {
        gather_.wait(param.updated());
        waited_for = update;
      }
      take(param, reason);
      members_.push_back(&param);
      tensors_.push_back(
          {param.shard(), param.full(), param.layout().shard_numel(), param.layout().dtype()});
    }
  } catch (...) {
    for (Param* param : members_) {  // without a call they would look as if they were there
      param->drop();
      give_back(*param, Pending());
    }
    throw;
  }
  if (members_.empty()) {
    return;
  }
  stats_.full_bytes_peak = std::max(stats_.full_bytes_peak, full_bytes_);
  if (reason == Reason::kDemand) {
    stats_.prefetch_misses += members_.size();
  }
  ++stats_.num_gathers;
  for (const Param* param : members_) {
    stats_.gathered_bytes += param->layout().full_bytes();
  }
  comm::CallOptions options;
  options.label = {unit, members_.front()->name()};
  options.stream = &gather_;
  const Pending gathered = parts_.group.start_all_gather(tensors_, options);
  for (const Param* param : members_) {
    slot_of(*param).gathered = gathered;
  }
}

void Gatherer::take(Param& param, Reason reason) {
  Slot& slot = slot_of(param);
  slot.block = arena_.allocate(param.layout().full_bytes(), gather_);
  slot.reason = reason;
  param.start_gather(slot.block.data);
  full_bytes_ += full_bytes_of(param);
}

void Gatherer::finish(std::span<Param* const> params, LabelId unit) {
  const device::PendingState* waited_for = nullptr;
  for (Param* param : params) {
    if (param->state() != ParamState::kGathering) {
      continue;
    }
    Slot& slot = slot_of(*param);
    if (slot.gathered.state().get() != waited_for) {
      wait(slot.gathered, unit);
      waited_for = slot.gathered.state().get();
    }
    if (slot.reason == Reason::kPrefetch) {
      ++stats_.prefetch_hits;
    }
    param->finish_gather();
  }
}

void Gatherer::wait(const Pending& gathered, LabelId unit) {
  const bool is_late = !gathered.done();
  const std::int64_t start_ns = is_late ? parts_.clock.now_ns() : 0;
  // Without a stream of its own the compute stream is this thread: waiting here is the same, and
  // a failure is thrown where it is known which unit is to blame, not kept in the stream.
  if (compute_.native_handle() == nullptr) {
    gathered.wait();
  } else {
    compute_.wait(gathered);
    if (gathered.done()) {
      gathered.wait();
    }
  }
  if (is_late) {
    const std::int64_t end_ns = parts_.clock.now_ns();
    stats_.exposed_wait_s += static_cast<double>(end_ns - start_ns) * 1e-9;
    if (parts_.spans.enabled()) {
      SpanArgs args;
      args.unit = unit;
      parts_.spans.record("wait for gather", start_ns, end_ns, args);
    }
  }
}

void Gatherer::release(Param& param, const Pending& last_use) {
  param.release();
  give_back(param, last_use);
}

void Gatherer::drop(Param& param) {
  Slot& slot = slot_of(param);
  param.drop();
  if (slot.reason == Reason::kPrefetch) {
    ++stats_.prefetch_drops;
  }
  if (!slot.gathered.done()) {
    drops_.push_back(slot.gathered);
  }
  give_back(param, slot.gathered);
}

void Gatherer::give_back(const Param& param, const Pending& last_use) {
  Slot& slot = slot_of(param);
  full_bytes_ -= full_bytes_of(param);
  arena_.release(std::exchange(slot.block, {}), last_use);
  slot.gathered = Pending();
}

Pending Gatherer::computed() { return compute_.record(); }

void Gatherer::wait_for_drops() {
  for (const Pending& gathered : drops_) {
    if (compute_.native_handle() == nullptr) {
      gathered.wait();
    } else {
      compute_.wait(gathered);
    }
  }
  drops_.clear();
}

void Gatherer::finish_and_drop(Param& param) {
  wait_ignoring_failure(slot_of(param).gathered);
  drop(param);
}

void Gatherer::finish_drops() noexcept {
  for (const Pending& gathered : drops_) {
    wait_ignoring_failure(gathered);
  }
  drops_.clear();
}

GathererStats Gatherer::take_stats() {
  GathererStats taken = stats_;
  stats_ = {};
  stats_.full_bytes_peak = full_bytes_;
  return taken;
}

}  // namespace tessera::coordinator
