#include "tessera/coordinator/inflight.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;
using shard::ParamState;

void InflightRegistry::add(const Param& param, Entry entry) {
  Slot& slot = slots_[static_cast<std::size_t>(param.id())];
  if (slot.is_there || param.state() != ParamState::kGathering) {
    throw StateError(
        detail::concat("parameter '", param.name(), "' is ", to_string(param.state()),
                       slot.is_there ? " and registered" : "",
                       "; only a gather that has just begun is registered as in flight"),
        param.name(), {});
  }
  slot.entry = std::move(entry);
  slot.is_there = true;
  ++num_params_;
}

const InflightRegistry::Entry& InflightRegistry::operator[](const Param& param) const {
  const Slot& slot = slot_of(param);
  if (!slot.is_there) {
    throw StateError(detail::concat("parameter '", param.name(), "' is not in flight; it is ",
                                    to_string(param.state())),
                     param.name(), {});
  }
  return slot.entry;
}

InflightRegistry::Entry InflightRegistry::take(const Param& param) {
  Entry entry = (*this)[param];
  slots_[static_cast<std::size_t>(param.id())] = {};
  --num_params_;
  return entry;
}

void InflightRegistry::add_call(std::vector<Pending> parts) { calls_.push_back(std::move(parts)); }

void InflightRegistry::forget_done_calls() {
  std::erase_if(calls_, [](const std::vector<Pending>& parts) {
    return std::all_of(parts.begin(), parts.end(), [](const Pending& part) { return part.done(); });
  });
}

std::size_t InflightRegistry::num_calls() {
  forget_done_calls();
  return calls_.size();
}

void InflightRegistry::wait_for_calls_below(std::size_t limit) {
  forget_done_calls();
  while (calls_.size() >= limit && !calls_.empty()) {
    for (const Pending& part : calls_.front()) {
      wait_ignoring_failure(part);
    }
    calls_.pop_front();
  }
}

}  // namespace tessera::coordinator
