// Internal to engine: lends memory that a backward has freed to the update that follows it.
//
// The activations of a unit are freed when its backward has ended, and their memory is not needed
// before its next forward. Meanwhile optimizer states are copied into it
// (optim/device_executor.h), while the link is idle.
//
//   backward of unit k has ended    torch holds less, lent memory included, than when backward
//                                   began: the difference is lent
//   forward of unit k begins        no more may be lent than when its backward ended; the forward
//                                   waits until the rest is returned
//
// So torch's peak does not rise: what is lent while a unit runs was freed by later units, whose
// activations do not exist yet. Slots are alike; a slot whose piece was written back earlier
// returns earlier. A reserve is kept for the rest of the backward: the most that one unit freed in
// the previous backward. So the first backward lends nothing. A unit without a backward neither
// lends nor reclaims memory.
//
// The memory is torch's, taken and returned as a tensor of the compute stream. Like activations it
// is not charged to the ledger.
//
// Threads: as Engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "tessera/engine/runtime.h"
#include "tessera/optim/device_executor.h"

namespace tessera::engine {

// How much of a GPU's memory may be lent while a backward runs.
struct SpareMemory {  // in bytes
  // Torch's allocator, now.
  std::int64_t taken = 0;  // used by tensors, lent memory included
  std::int64_t held = 0;   // of the device
  // When backward began.
  std::int64_t taken_at_begin = 0;
  std::int64_t free_at_begin = 0;  // unallocated memory of the device
  // Needed by the rest of the backward; 0: not known yet.
  std::int64_t reserve = 0;
  std::int64_t lent = 0;
};

// Lend only memory that torch's allocator already holds, and never more than the device had free
// when backward began. If lending fragments the cache so badly that the next forward must allocate
// anew, that much is still free on the device. So lending cannot cause an out-of-memory failure.
inline bool is_spare(const SpareMemory& memory, std::int64_t bytes) {
  return memory.reserve > 0 && memory.taken + bytes + memory.reserve <= memory.taken_at_begin &&
         memory.taken + bytes <= memory.held && memory.lent + bytes <= memory.free_at_begin;
}

class MemoryLender {
 public:
  // Both outlive this.
  MemoryLender(Runtime& runtime, optim::DeviceExecutor& borrower);
  // `lends`: an update follows this backward.
  void begin_backward(bool lends);
  void end_backward_of(int unit);
  void begin_forward_of(int unit);
  void take_all_back();
  // Seconds spent waiting for lent memory since the last call.
  double take_wait_s() { return std::exchange(wait_s_, 0.0); }

 private:
  bool has_spare_memory() const;
  void keep_lent(std::size_t num_slots);
  void note_freed();

  Runtime& runtime_;
  optim::DeviceExecutor& borrower_;
  bool lends_ = false;
  double wait_s_ = 0;
  std::size_t num_lent_ = 0;
  // By unit: slots lent when its last use's backward ended, in the last backward.
  std::unordered_map<int, std::size_t> lent_before_;
  // CUDA only.
  std::int64_t taken_at_begin_ = 0;
  std::int64_t free_at_begin_ = 0;
  std::int64_t last_bytes_ = 0;     // taken when the last unit's backward ended
  std::int64_t freed_bytes_ = 0;    // the most that one unit freed in this backward
  std::int64_t reserve_bytes_ = 0;  // the same for the last backward; 0: none
};

}  // namespace tessera::engine
