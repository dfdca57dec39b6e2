#include "tessera/optim/clip.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"

namespace tessera::optim {

StepFactors step_factors(const StepSums& sums, double loss_scale, double clip_norm) {
  TESSERA_CHECK(sums.weight > 0 && std::isfinite(sums.weight), ConfigError,
                "the weights of all ranks and micro-batches of this step sum up to ", sums.weight,
                "; a mean needs a positive sum: give every backward the number of its tokens");
  TESSERA_INVARIANT(loss_scale > 0, "loss scale ", loss_scale);
  TESSERA_INVARIANT(clip_norm >= 0, "clip norm ", clip_norm);
  // In this order, so that a weight and a scale of 1 change no bit.
  const double divisor = sums.weight * loss_scale;
  StepFactors factors;
  factors.finite = std::isfinite(sums.gradient_squares);
  factors.grad_norm = std::sqrt(sums.gradient_squares) / divisor;
  factors.gradient_scale = 1 / divisor;
  factors.loss = sums.weighted_loss / sums.weight;
  // An infinite norm would clip everything finite to zero and hide what happened.
  if (factors.finite && clip_norm > 0) {
    constexpr double kEps = 1e-6;
    factors.gradient_scale *= std::min(1.0, clip_norm / (factors.grad_norm + kEps));
  }
  return factors;
}

}  // namespace tessera::optim
