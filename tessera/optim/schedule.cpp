#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::optim {
namespace {

// Of a run, where a default warm-up does not fit into it.
constexpr std::int64_t kRunPerWarmup = 10;

Decay decay_of(const std::string& kind) {
  return kind == "linear"       ? Decay::kLinear
         : kind == "cosine"     ? Decay::kCosine
         : kind == "one_cycle"  ? Decay::kOneCycle
         : kind == "range_test" ? Decay::kRangeTest
                                : Decay::kConstant;
}

bool has_warmup(Decay decay) { return decay != Decay::kOneCycle && decay != Decay::kRangeTest; }

void fit_warmup(ScheduleOptions& options, const Config& config) {
  const bool fits = options.total_steps == 0 || options.warmup_steps <= options.total_steps;
  if (fits || !has_warmup(options.decay)) {
    return;
  }
  const std::string warmup = config.shown("schedule.warmup_steps");
  const std::string run = detail::concat("the ", options.total_steps, " steps of the run");
  if (!config.is_given("schedule.warmup_steps")) {
    options.warmup_steps = options.total_steps / kRunPerWarmup;
    options.notice = detail::concat(warmup, " is more than ", run, ": a tenth of them is taken, ",
                                    options.warmup_steps);
    return;
  }
  TESSERA_CHECK(options.deepspeed_timing, ConfigError, warmup, " is more than ", run,
                ": the learning rate would never be reached; give a shorter warm-up or more steps");
  options.notice =
      detail::concat(run, " end within the warm-up, ", warmup, ": the last learning rate is ",
                     exact_number(learning_rate(options, options.total_steps - 1)), ", not ",
                     exact_number(options.lr));
}

double warmup_progress(const ScheduleOptions& options, std::int64_t step) {
  if (options.warmup_shape == WarmupShape::kLinear) {
    return static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  }
  // DeepSpeed's WarmupLR: reaches 1 one step early, and takes a warm-up of one step for two.
  const auto steps = static_cast<double>(std::max<std::int64_t>(options.warmup_steps, 2));
  return std::log(static_cast<double>(step) + 1) / std::log(steps);
}

// How far up a side of the cycle: 0 at its foot, 1 at the top. Stairs are cut from whole numbers,
// so that the top is never missed by a rounding.
double cycle_height(std::int64_t step, std::int64_t num_steps, std::int64_t num_stairs) {
  const auto whole = static_cast<double>(num_steps);
  if (num_stairs == 0) {
    return static_cast<double>(step) / whole;
  }
  const auto stairs = static_cast<double>(num_stairs);
  return std::floor(static_cast<double>(step) * stairs / whole) / stairs;
}

double one_cycle(const ScheduleOptions& options, std::int64_t step) {
  const std::int64_t cycle_steps = options.cycle_up_steps + options.cycle_down_steps;
  if (step < cycle_steps) {
    const double height =
        step <= options.cycle_up_steps
            ? cycle_height(step, options.cycle_up_steps, options.cycle_up_stairs)
            : cycle_height(cycle_steps - step, options.cycle_down_steps, options.cycle_down_stairs);
    return std::lerp(options.warmup_start_lr, options.lr, height);
  }
  if (options.decay_steps == 0) {
    return options.warmup_start_lr;
  }
  const double units =
      static_cast<double>(step - cycle_steps) / static_cast<double>(options.decay_steps);
  return options.warmup_start_lr / (1 + options.decay_rate * units);
}

double range_test(const ScheduleOptions& options, std::int64_t step) {
  const double units = static_cast<double>(step) / static_cast<double>(options.range_steps);
  const double growth = options.range_staircase ? std::floor(units) : units;
  return options.warmup_start_lr * (1 + options.range_rate * growth);
}

}  // namespace

ScheduleOptions ScheduleOptions::from(const Config& config, std::int64_t run_steps) {
  ScheduleOptions options;
  const std::string& kind = config.get_string("schedule.kind");
  options.decay = decay_of(kind);
  options.warmup_shape = config.get_string("schedule.warmup_shape") == "log" ? WarmupShape::kLog
                                                                             : WarmupShape::kLinear;
  options.lr = config.get_double("optim.lr");
  options.warmup_start_lr = config.get_double("schedule.warmup_start_lr");
  options.final_lr = config.get_double("schedule.final_lr");
  options.warmup_steps = config.get_int("schedule.warmup_steps");
  options.total_steps = config.get_int("schedule.total_steps");
  options.first_step = config.get_int("schedule.first_step");
  options.deepspeed_timing = config.get_bool("schedule.deepspeed_timing");
  options.cycle_up_steps = config.get_int("schedule.cycle_up_steps");
  options.cycle_down_steps = config.get_int("schedule.cycle_down_steps");
  if (options.cycle_down_steps == 0) {
    options.cycle_down_steps = options.cycle_up_steps;
  }
  options.cycle_up_stairs = config.get_int("schedule.cycle_up_stairs");
  options.cycle_down_stairs = config.get_int("schedule.cycle_down_stairs");
  options.decay_steps = config.get_int("schedule.decay_steps");
  options.decay_rate = config.get_double("schedule.decay_rate");
  options.range_steps = config.get_int("schedule.range_steps");
  options.range_rate = config.get_double("schedule.range_rate");
  options.range_staircase = config.get_bool("schedule.range_staircase");
  if (options.total_steps == 0) {
    options.total_steps = run_steps;
  }
  const bool needs_end = options.decay == Decay::kLinear || options.decay == Decay::kCosine;
  TESSERA_CHECK(!needs_end || options.total_steps > 0, ConfigError, "schedule.kind = ", kind,
                " needs an end: set schedule.total_steps");
  fit_warmup(options, config);
  return options;
}

double learning_rate(const ScheduleOptions& options, std::int64_t step) {
  TESSERA_INVARIANT(step >= 0, "learning rate of step ", step);
  const std::int64_t at = step + options.first_step;
  if (options.decay == Decay::kOneCycle) {
    return one_cycle(options, at);
  }
  if (options.decay == Decay::kRangeTest) {
    return range_test(options, at);
  }
  const std::int64_t late = options.deepspeed_timing ? std::max<std::int64_t>(at - 1, 0) : at;
  if (late < options.warmup_steps) {
    return std::lerp(options.warmup_start_lr, options.lr, warmup_progress(options, late));
  }
  if (options.decay == Decay::kConstant) {
    return options.lr;
  }
  const std::int64_t decayed = options.decay == Decay::kLinear ? late : at;
  if (decayed >= options.total_steps) {
    return options.final_lr;
  }
  const double progress = static_cast<double>(decayed - options.warmup_steps) /
                          static_cast<double>(options.total_steps - options.warmup_steps);
  const double left = options.decay == Decay::kLinear
                          ? 1 - progress
                          : 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return std::lerp(options.final_lr, options.lr, left);
}

}  // namespace tessera::optim
