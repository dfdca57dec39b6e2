// From the sums of all ranks to the one factor that the update folds in. Pure.
//
// Threads: plain data.
#pragma once

namespace tessera::optim {

// Sums over all ranks and micro-batches of one step, made by one all-reduce.
struct StepSums {
  double gradient_squares = 0;  // of weighted, loss-scaled gradients
  double weight = 0;
  double weighted_loss = 0;
};

struct StepFactors {
  bool finite = true;
  double grad_norm = 0;       // of the mean gradient, before clipping; as it came, if not finite
  double gradient_scale = 1;  // clip factor / (weight * loss scale)
  double loss = 0;            // weighted mean
};

// `clip_norm` 0: no clipping. The clip factor is min(1, clip_norm / (norm + 1e-6)), as in torch and
// DeepSpeed. Throws ConfigError if the weights of all ranks sum up to zero or less.
StepFactors step_factors(const StepSums& sums, double loss_scale, double clip_norm);

}  // namespace tessera::optim
