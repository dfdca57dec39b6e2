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

LossScale::LossScale(const LossScaleOptions& options)
    : options_(options), hysteresis_left_(options.hysteresis) {
  if (options.enabled) {
    value_ = options.fixed > 0 ? options.fixed : options.initial;
  }
}

void LossScale::update(bool finite) {
  if (!options_.enabled || options_.fixed > 0) {
    return;
  }
  if (finite) {
    ++good_steps_;
    const bool grows = good_steps_ == options_.window;
    if (grows) {
      value_ *= 2;
      good_steps_ = 0;
    }
    if (grows || options_.consecutive_hysteresis) {
      hysteresis_left_ = options_.hysteresis;
    }
    return;
  }
  good_steps_ = 0;
  if (hysteresis_left_ > 1) {
    --hysteresis_left_;
    return;
  }
  TESSERA_CHECK(
      value_ > options_.min, ConfigError,
      "gradients are not finite even with the smallest loss scale, loss_scale.min = ", options_.min,
      "; lower optim.lr, or train with precision = bf16, which needs no loss scale");
  value_ = std::max(value_ / 2, options_.min);
}

}  // namespace tessera::optim
