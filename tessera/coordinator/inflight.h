// Internal to coordinator: the gathers that are on their way, by parameter and by call.
//
// Invariants:
//  (1) A parameter has an entry exactly while it is gathering.
//  (2) num_calls() counts calls that are not done, also those whose parameters were all dropped.
// Everything else is a StateError with the parameter.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "tessera/coordinator/access_trace.h"
#include "tessera/device/pending.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

// Why a gather was started, and for whom.
enum class Reason : std::uint8_t { kDemand, kPrefetch };
struct Cause {
  UnitId unit = -1;  // -1: for somebody who is no unit
  Phase phase = Phase::kForward;
  Reason reason = Reason::kDemand;
};

class InflightRegistry {
 public:
  explicit InflightRegistry(std::size_t num_params) : slots_(num_params) {}

  struct Entry {
    device::Pending gathered;
    Cause cause;
  };

  // Throws StateError unless the parameter is gathering and has no entry.
  void add(const shard::Param& param, Entry entry);
  // Both throw StateError unless there is an entry.
  const Entry& operator[](const shard::Param& param) const;
  Entry take(const shard::Param& param);
  bool contains(const shard::Param& param) const { return slot_of(param).is_there; }
  std::size_t num_params() const { return num_params_; }

  void add_call(std::vector<device::Pending> parts);
  std::size_t num_calls();
  // Blocks until fewer than `limit` calls are in flight; what a call failed with is told to those
  // who wait for its parameters.
  void wait_for_calls_below(std::size_t limit);

 private:
  struct Slot {
    Entry entry;
    bool is_there = false;
  };
  const Slot& slot_of(const shard::Param& param) const {
    return slots_[static_cast<std::size_t>(param.id())];
  }
  void forget_done_calls();

  std::vector<Slot> slots_;  // by parameter id
  std::size_t num_params_ = 0;
  std::deque<std::vector<device::Pending>> calls_;
};

}  // namespace tessera::coordinator
