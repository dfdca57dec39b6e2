// The arithmetic from a step's sums over ranks to its factor: included by the host's step_factors()
// and by the kernel of the GPU, so that there is one of each. All in double, where products,
// quotients and roots are IEEE's on every machine; see element_rules.cuh, [Note: one arithmetic].
//
// Threads: stateless.
#pragma once

#include <cmath>

#include "tessera/core/host_device.cuh"
#include "tessera/optim/clip.h"
#include "tessera/optim/element_rules.cuh"

namespace tessera::optim {

// Of the weights of all ranks.
TESSERA_HOST_DEVICE inline bool gives_mean(double weight) {
  return weight > 0 && std::isfinite(weight);
}

TESSERA_HOST_DEVICE inline StepOnDevice step_rule(const StepSums& sums, const StepInputs& inputs) {
  constexpr double kEps = 1e-6;
  // In this order, so that a weight and a scale of 1 change no bit.
  const double divisor = sums.weight * inputs.loss_scale;
  const bool finite = std::isfinite(sums.gradient_squares);
  StepOnDevice step;
  step.gradient_squares = sums.gradient_squares;
  step.grad_norm = ::sqrt(sums.gradient_squares) / divisor;
  step.gradient_scale = 1 / divisor;
  // An infinite norm would clip everything finite to zero and hide what happened.
  if (finite && inputs.clip_norm > 0) {
    const double factor = inputs.clip_norm / (step.grad_norm + kEps);
    step.gradient_scale *= factor < 1 ? factor : 1;
  }
  step.finite = finite ? 1 : 0;
  step.skips = (!finite && inputs.skips_nonfinite) || !gives_mean(sums.weight) ? 1 : 0;
  return step;
}

// The factor as elements take it: rounded once, as element_scalars() does.
TESSERA_HOST_DEVICE inline float element_factor(const StepOnDevice& step) {
  return static_cast<float>(step.gradient_scale);
}

}  // namespace tessera::optim
