#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

double warmup_progress(const ScheduleOptions& options, std::int64_t step) {
  if (options.warmup_shape == WarmupShape::kLinear) {
    return static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  }
  // DeepSpeed's WarmupLR: reaches 1 one step early, and takes a warm-up of one step for two.
  const auto steps = static_cast<double>(std::max<std::int64_t>(options.warmup_steps, 2));
  return std::log(static_cast<double>(step) + 1) / std::log(steps);
}

}  // namespace

ScheduleOptions ScheduleOptions::from(const Config& config, std::int64_t run_steps) {
  ScheduleOptions options;
  const std::string& kind = config.get_string("schedule.kind");
  options.decay = kind == "cosine"   ? Decay::kCosine
                  : kind == "linear" ? Decay::kLinear
                                     : Decay::kConstant;
  options.warmup_shape = config.get_string("schedule.warmup_shape") == "log" ? WarmupShape::kLog
                                                                             : WarmupShape::kLinear;
  options.lr = config.get_double("optim.lr");
  options.warmup_start_lr = config.get_double("schedule.warmup_start_lr");
  options.final_lr = config.get_double("schedule.final_lr");
  options.warmup_steps = config.get_int("schedule.warmup_steps");
  options.total_steps = config.get_int("schedule.total_steps");
  if (options.total_steps == 0) {
    options.total_steps = run_steps;
  }
  TESSERA_CHECK(options.decay == Decay::kConstant || options.total_steps > 0, ConfigError,
                "schedule.kind = ", kind, " needs an end: set schedule.total_steps");
  TESSERA_CHECK(options.total_steps == 0 || options.warmup_steps <= options.total_steps,
                ConfigError, "schedule.warmup_steps = ", options.warmup_steps, " is more than the ",
                options.total_steps, " steps of the run: the learning rate would never be reached");
  return options;
}

double learning_rate(const ScheduleOptions& options, std::int64_t step) {
  TESSERA_INVARIANT(step >= 0, "learning rate of step ", step);
  if (step < options.warmup_steps) {
    return std::lerp(options.warmup_start_lr, options.lr, warmup_progress(options, step));
  }
  if (options.decay == Decay::kConstant) {
    return options.lr;
  }
  if (step >= options.total_steps) {
    return options.final_lr;
  }
  const double progress = static_cast<double>(step - options.warmup_steps) /
                          static_cast<double>(options.total_steps - options.warmup_steps);
  const double left = options.decay == Decay::kLinear
                          ? 1 - progress
                          : 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return std::lerp(options.final_lr, options.lr, left);
}

}  // namespace tessera::optim
