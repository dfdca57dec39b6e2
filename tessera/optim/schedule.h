// The learning rate as a function of the step number. Pure.
//
// Warm-up from start_lr to lr over warmup_steps (linear, or logarithmic as DeepSpeed's WarmupLR),
// then constant, linear or cosine down to final_lr at total_steps, and final_lr after that.
//
// Threads: plain data.
#pragma once

#include <cstdint>

namespace tessera {
class Config;
}

namespace tessera::optim {

enum class Decay : std::uint8_t { kConstant, kLinear, kCosine };
enum class WarmupShape : std::uint8_t { kLinear, kLog };

struct ScheduleOptions {
  Decay decay = Decay::kConstant;
  WarmupShape warmup_shape = WarmupShape::kLinear;
  double lr = 1e-3;
  double warmup_start_lr = 0;
  double final_lr = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;  // 0 is only allowed where nothing decays
  // `run_steps` stands for schedule.total_steps = 0. Throws ConfigError for contradictions: a decay
  // without an end, a warm-up that is longer than the run.
  static ScheduleOptions from(const Config& config, std::int64_t run_steps);
};

// `step` from 0.
double learning_rate(const ScheduleOptions& options, std::int64_t step);

}  // namespace tessera::optim
