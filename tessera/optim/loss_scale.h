// The loss scale of fp16 training: a state machine without arithmetic on tensors.
//
// Dynamic: a non-finite step uses up hysteresis, then halves the scale (never below `min`; a
// non-finite step at `min` is a ConfigError that says so); `window` good steps in a row double it
// and refill the hysteresis (or every good step refills it: consecutive_hysteresis). Fixed:
// constant. Other precisions: 1.
//
// Threads: plain data.
#pragma once

#include <cstdint>

#include "tessera/core/dtype.h"

namespace tessera {
class Config;
}

namespace tessera::optim {

struct LossScaleOptions {
  bool enabled = false;  // fp16
  double fixed = 0;      // 0: dynamic
  double initial = 65536;
  double min = 1;
  std::int64_t window = 1000;
  std::int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  // `param_dtype`: what is trained, whatever the option says.
  static LossScaleOptions from(const Config& config, DType param_dtype);
};

// What of it changes from step to step.
struct LossScaleState {
  double value = 1;
  std::int64_t hysteresis_left = 0;
  std::int64_t good_steps = 0;
};

class LossScale {
 public:
  explicit LossScale(const LossScaleOptions& options);
  double value() const { return state_.value; }
  const LossScaleState& state() const { return state_; }
  // Goes on from there, if the scale is dynamic; else it stays what the options say.
  void set_state(const LossScaleState& state);
  // After every step. Throws ConfigError when the dynamic scale cannot shrink any more.
  void update(bool finite);

 private:
  const LossScaleOptions options_;
  LossScaleState state_;
};

}  // namespace tessera::optim
