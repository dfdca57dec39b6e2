// The learning rate as a function of the step number. Pure.
//
//   constant, linear, cosine   warm-up from warmup_start_lr to lr over warmup_steps (linear, or
//                              logarithmic as DeepSpeed's), then constant, or down to final_lr at
//                              total_steps, and final_lr after that
//   one_cycle                  from warmup_start_lr up to lr and back down, then an optional decay
//   range_test                 from warmup_start_lr upwards without an end
//
// The last two are DeepSpeed's OneCycle and LRRangeTest. Its Warmup* schedules are the first three
// with `deepspeed_timing`.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {
class Config;
}

namespace tessera::optim {

enum class Decay : std::uint8_t { kConstant, kLinear, kCosine, kOneCycle, kRangeTest };
enum class WarmupShape : std::uint8_t { kLinear, kLog };

struct ScheduleOptions {
  Decay decay = Decay::kConstant;
  WarmupShape warmup_shape = WarmupShape::kLinear;
  double lr = 1e-3;
  double warmup_start_lr = 0;
  double final_lr = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;  // 0 is only allowed where nothing decays
  std::int64_t first_step = 0;   // of the schedule, at step 0
  // DeepSpeed sets the learning rate of a step from the number of the step before it, and has its
  // first value at steps 0 and 1. Only its cosine makes up for it.
  bool deepspeed_timing = false;

  // For one_cycle.
  std::int64_t cycle_up_steps = 2000;
  std::int64_t cycle_down_steps = 2000;
  std::int64_t cycle_up_stairs = 0;  // 0: a slope
  std::int64_t cycle_down_stairs = 0;
  std::int64_t decay_steps = 0;  // 0: no decay after the cycle
  double decay_rate = 0;

  // For range_test.
  std::int64_t range_steps = 2000;
  double range_rate = 1;
  bool range_staircase = false;

  // One log line on how the options were fitted to the run; usually empty.
  std::string notice;

  // `run_steps` stands for schedule.total_steps = 0. Throws ConfigError for contradictions: a decay
  // without an end, a warm-up that is longer than the run. A warm-up that nobody gave (DeepSpeed's
  // default) is fitted to the run instead; one of a DeepSpeed schedule may outlast it, as there.
  static ScheduleOptions from(const Config& config, std::int64_t run_steps);
};

// `step` from 0.
double learning_rate(const ScheduleOptions& options, std::int64_t step);

}  // namespace tessera::optim
