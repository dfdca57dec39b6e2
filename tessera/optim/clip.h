// From the sums of all ranks to the one factor that the update folds in. Pure.
//
// Threads: plain data.
#pragma once

#include <cstdint>

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

// What turns a sum of squares into a factor.
struct StepInputs {
  double weight = 0;  // the sum over all ranks
  double loss_scale = 1;
  double clip_norm = 0;          // 0: no clipping
  bool skips_nonfinite = false;  // a sum that is not finite: the step changes nothing
};

// The factors of one step in memory that kernels write and read: those of the update take them from
// there (UpdateScalars::on_device), so that the host need not wait for the norm in between.
struct StepOnDevice {
  double gradient_squares;
  double grad_norm;       // as in StepFactors
  double gradient_scale;  // as in StepFactors
  std::int32_t finite;
  std::int32_t skips;  // updates leave every bit as it is
};

// InternalError for a scale or limit that cannot be, and ConfigError if the weights of all ranks
// sum up to zero or less.
void check_step_inputs(const StepInputs& inputs);

// The clip factor is min(1, clip_norm / (norm + 1e-6)), as in torch and DeepSpeed. Checks its
// inputs.
StepFactors step_factors(const StepSums& sums, double loss_scale, double clip_norm);

}  // namespace tessera::optim
