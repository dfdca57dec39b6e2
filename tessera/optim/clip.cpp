#include "tessera/optim/clip.h"

#include "tessera/core/error.h"
#include "tessera/optim/step_rules.cuh"

namespace tessera::optim {

void check_step_inputs(const StepInputs& inputs) {
  TESSERA_INVARIANT(inputs.loss_scale > 0, "loss scale ", inputs.loss_scale);
  TESSERA_INVARIANT(inputs.clip_norm >= 0, "clip norm ", inputs.clip_norm);
}

StepFactors step_factors(const StepSums& sums, double loss_scale, double clip_norm) {
  const StepInputs inputs{loss_scale, clip_norm};
  check_step_inputs(inputs);
  TESSERA_CHECK(gives_mean(sums.weight), ConfigError,
                "the weights of all ranks and micro-batches of this step sum up to ", sums.weight,
                "; a mean needs a positive sum: give every backward the number of its tokens");
  const StepOnDevice step = step_rule(sums, inputs);
  StepFactors factors;
  factors.finite = step.finite != 0;
  factors.grad_norm = step.grad_norm;
  factors.gradient_scale = step.gradient_scale;
  factors.loss = sums.weighted_loss / sums.weight;
  return factors;
}

}  // namespace tessera::optim
