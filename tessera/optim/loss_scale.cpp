#include "tessera/optim/loss_scale.h"

#include <algorithm>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::optim {

LossScaleOptions LossScaleOptions::from(const Config& config, DType param_dtype) {
  LossScaleOptions options;
  options.enabled = param_dtype == DType::kFloat16;
  options.fixed = config.get_double("loss_scale.fixed");
  options.initial = config.get_double("loss_scale.initial");
  options.min = config.get_double("loss_scale.min");
  options.window = config.get_int("loss_scale.window");
  options.hysteresis = config.get_int("loss_scale.hysteresis");
  options.consecutive_hysteresis = config.get_bool("loss_scale.consecutive_hysteresis");
  return options;
}

LossScale::LossScale(const LossScaleOptions& options) : options_(options) {
  state_.hysteresis_left = options.hysteresis;
  if (options.enabled) {
    state_.value = options.fixed > 0 ? options.fixed : options.initial;
  }
}

void LossScale::set_state(const LossScaleState& state) {
  if (options_.enabled && options_.fixed <= 0) {
    state_ = state;
  }
}

void LossScale::update(bool finite) {
  if (!options_.enabled || options_.fixed > 0) {
    return;
  }
  if (finite) {
    ++state_.good_steps;
    const bool grows = state_.good_steps == options_.window;
    if (grows) {
      state_.value *= 2;
      state_.good_steps = 0;
    }
    if (grows || options_.consecutive_hysteresis) {
      state_.hysteresis_left = options_.hysteresis;
    }
    return;
  }
  state_.good_steps = 0;
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
    return;
  }
  TESSERA_CHECK(
      state_.value > options_.min, ConfigError,
      "gradients are not finite even with the smallest loss scale, loss_scale.min = ", options_.min,
      "; lower optim.lr, or train with precision = bf16, which needs no loss scale");
  state_.value = std::max(state_.value / 2, options_.min);
}

}  // namespace tessera::optim
