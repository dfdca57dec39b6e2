// Internal to engine: lends memory that a backward has freed to the update that comes after it.
//
// Activations of a unit are gone when its backward has ended, and nobody needs their memory before
// its next forward. Meanwhile states of the optimizer may come up to the device in it
// (optim/device_update.h): the link has nothing else to do then.
//
//   backward of unit k has ended    what torch holds now, with what is lent, is less than when
//                                   backward began: as much is lent, in k's name
//   forward of unit k begins        k's memory is given back; the forward waits for it
//
// So the peak of torch's memory stays what it was: whatever is lent while a unit runs was lent in
// the name of units that come after it, and their activations do not exist yet. What the units
// before k still need in this backward, besides their activations, is left to them: about as much
// as the largest unit has freed in the backward before. The first one lends nothing.
//
// Only units of the first half of a backward lend: the others' forwards come so soon that they
// would wait for states to go down again.
//
// It is torch's memory, taken and given back as a tensor of the compute stream: no ledger knows it,
// as none knows activations.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <utility>

#include "tessera/engine/runtime.h"
#include "tessera/optim/device_update.h"

namespace tessera::engine {

class MemoryLender {
 public:
  // Both outlive this.
  MemoryLender(Runtime& runtime, optim::DeviceUpdate& borrower);
  // `lends`: an update follows this backward.
  void begin_backward(bool lends);
  void end_backward_of(int unit);
  void begin_forward_of(int unit);
  void take_all_back();
  // For what was lent, since the last call.
  double take_wait_s() { return std::exchange(wait_s_, 0.0); }

 private:
  bool has_spare_memory() const;
  void take_back(int unit);
  void note_freed();

  Runtime& runtime_;
  optim::DeviceUpdate& borrower_;
  bool lends_ = false;
  double wait_s_ = 0;
  int num_lent_ = 0;        // since all was taken back
  int num_ended_ = 0;       // units, in this backward
  int num_last_ended_ = 0;  // in the one before
  // Of torch, on CUDA.
  std::int64_t bytes_at_begin_ = 0;  // when backward began
  std::int64_t last_bytes_ = 0;      // when the last unit's backward had ended, and what was lent
  std::int64_t freed_bytes_ = 0;     // by one unit, at most, in this backward
  std::int64_t reserve_bytes_ = 0;   // the same of the last one; 0: there was none
};

}  // namespace tessera::engine
