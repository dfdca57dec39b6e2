#include "cli/divergence.h"

#include <cmath>

#include <fmt/format.h>

namespace tessera::cli {

void Divergence::add(const StepMetrics& metrics) {
  const bool looks_for_scale = std::isfinite(metrics.loss) && metrics.loss_scale > 1 &&
                               (last_scale_ == 0 || metrics.loss_scale < last_scale_);
  const bool is_lost = !std::isfinite(metrics.loss) || (metrics.skipped && !looks_for_scale);
  num_lost_ += is_lost ? 1 : 0;
  num_lost_in_a_row_ = is_lost ? num_lost_in_a_row_ + 1 : 0;
  const bool is_finite = std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm);
  if (!metrics.skipped && !is_finite && spoilt_since_ < 0) {
    spoilt_since_ = metrics.step;
  }
  ++num_steps_;
  last_loss_ = metrics.loss;
  last_scale_ = metrics.loss_scale;
}

bool Divergence::has_diverged() const {
  return num_steps_ > 0 &&
         (!std::isfinite(last_loss_) || is_going_on() || 2 * num_lost_ > num_steps_);
}

std::string Divergence::text(DType dtype) const {
  std::string text = fmt::format(
      "training diverged: {} of {} steps had a loss or gradient that is "
      "not finite, the last {} of them in a row",
      num_lost_, num_steps_, num_lost_in_a_row_);
  if (has_spoilt_parameters()) {
    text += fmt::format("; parameters are not finite since step {}", spoilt_since_);
  }
  return fmt::format(
      "{}; try a lower learning rate (--lr), warm-up (--set schedule.warmup_steps=N){} clipping "
      "(--clip 1){}",
      text, dtype == DType::kFloat32 ? " or" : ",",
      dtype == DType::kFloat32 ? "" : " or --precision fp32");
}

}  // namespace tessera::cli
