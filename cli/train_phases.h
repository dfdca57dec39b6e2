// Where the time of a step goes: forward, backward, update.
//
// On a CPU the times are those of the calls. On a GPU the calls return before the work is
// done, so events on the compute stream are timed: forward and backward are the device's own times,
// waits for gathers included, and the update is what is left of the step behind the last backward:
// reductions, the norm, and what of the update did not overlap with the next forward. Nothing waits
// for an event: a step whose events are not done when it ends has no times (NaN).
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/core/clock.h"

namespace tessera::cli {

class StepPhases {
 public:
  struct Times {
    double forward_s = 0;
    double backward_s = 0;
    double update_s = 0;
  };

  // `cuda_device` below zero: the CPU. `clock` outlives this object.
  StepPhases(int cuda_device, const Clock& clock);
  ~StepPhases();
  StepPhases(const StepPhases&) = delete;
  StepPhases& operator=(const StepPhases&) = delete;

  void begin_step();
  // For each micro-batch, in this order.
  void begin_forward();
  void begin_backward();
  void end_backward();
  void begin_update();
  // When the update's call has returned.
  Times end_step();

 private:
  class DeviceEvents;

  double since_s(std::int64_t start_ns) const;

  const Clock& clock_;
  std::unique_ptr<DeviceEvents> events_;  // null: the CPU
  std::int64_t step_begin_ns_ = 0;
  std::int64_t phase_begin_ns_ = 0;
  Times times_;
};

}  // namespace tessera::cli
