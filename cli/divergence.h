// Has a training run diverged? Decided from what every rank knows alike: loss, norm, loss scale,
// and whether the step was skipped.
//
// A step is lost if its loss is not finite, or if it was skipped. Not lost is a skip with which a
// dynamic loss scale looks for its value: the loss is finite, and the scale is above 1 and lower
// than in the step before, or there was none before.
//
// A run has diverged if at its end
//   the last loss is not finite, or
//   the last kLostInARow steps were lost, or
//   more than half of all steps were lost.
// It diverges while it runs, for --stop-on-divergence, when kLostInARow steps in a row are lost.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>

#include "cli/metrics.h"
#include "tessera/core/dtype.h"

namespace tessera::cli {

class Divergence {
 public:
  static constexpr std::int64_t kLostInARow = 10;

  void add(const StepMetrics& metrics);

  bool is_going_on() const { return num_lost_in_a_row_ >= kLostInARow; }
  bool has_diverged() const;
  // An update was made with a gradient that is not finite (grad.skip_nonfinite=false): no parameter
  // that it reached is a number any more.
  bool has_spoilt_parameters() const { return spoilt_since_ >= 0; }

  // One line: what happened, from which step on (from 1, as on screen), and what to try.
  // `dtype`: what is trained.
  std::string text(DType dtype) const;

 private:
  std::int64_t num_steps_ = 0;
  std::int64_t num_lost_ = 0;
  std::int64_t num_lost_in_a_row_ = 0;
  std::int64_t spoilt_since_ = -1;
  double last_loss_ = 0;
  double last_scale_ = 0;  // 0: no step yet
};

}  // namespace tessera::cli
