// From the sums of all ranks to the one factor that the update folds in. Pure.
//
// Threads: plain data.
#pragma once

#include <cstdint>

namespace tessera::optim {

// Sums over all micro-batches of one step: of a rank, and of all ranks, made by one all-reduce of
// doubles that lie as they do here.
struct StepSums {
  double gradient_squares = 0;  // of weighted, loss-scaled gradients
  double weight = 0;
  double weighted_loss = 0;
  double votes[3] = {};  // the engine's, which travel along
};
inline constexpr std::int64_t kNumStepSums = 6;
static_assert(sizeof(StepSums) == kNumStepSums * sizeof(double));
// The label of the step's all-reduce in messages.
inline constexpr const char* kStepSumsLabel = "norm";

struct StepFactors {
  bool finite = true;
  double grad_norm = 0;       // of the mean gradient, before clipping; as it came, if not finite
  double gradient_scale = 1;  // clip factor / (weight * loss scale)
  double loss = 0;            // weighted mean
};

// Inputs of the step factor, in addition to the sums.
struct StepInputs {
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
  std::int32_t skips;  // updates leave every bit as it is; also where the weights give no mean
};

// The same for the host, with the sums.
struct FoundStep {
  StepOnDevice step;
  StepSums sums;
};

// InternalError for a scale or limit that cannot be.
void check_step_inputs(const StepInputs& inputs);

// The clip factor is min(1, clip_norm / (norm + 1e-6)), as in torch and DeepSpeed. Checks its
// inputs; ConfigError if the weights of all ranks sum up to zero or less.
StepFactors step_factors(const StepSums& sums, double loss_scale, double clip_norm);

}  // namespace tessera::optim
