// The flags of the learning rate's schedule: each sets the option schedule.* that it names.
//
// Threads: main thread only.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace tessera {
class Config;
}

namespace tessera::cli {

// As they were typed; empty: not given.
struct ScheduleFlags {
  std::string kind;
  std::string warmup;
  std::string warmup_shape;
  std::string start_lr;
  std::string min_lr;
  std::string steps;
};

// In a group of their own, together with --lr where the app has it.
void add_schedule_flags(CLI::App& app, ScheduleFlags& flags);

void apply_schedule_flags(const ScheduleFlags& flags, Config& config);

}  // namespace tessera::cli
