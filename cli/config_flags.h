// Flags that set options: `--config FILE` and `--set name=value` of every command that reads
// options, and those of the learning rate's schedule.
//
// Threads: main thread only.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/config.h"

namespace CLI {
class App;
}

namespace tessera::cli {

struct ConfigFlags {
  std::string file;
  std::vector<std::string> settings;
};

void add_config_flags(CLI::App& app, ConfigFlags& flags);
// Only --set: for commands that take the file as an argument.
void add_set_flag(CLI::App& app, ConfigFlags& flags);

// The file, then the settings in their order. Config::check() is left to the caller, whose own
// flags may be what is missing.
Config load_config(const ConfigFlags& flags);

// Sets an option to what a flag says, under the flag's name; an empty text is a flag not given.
void set_from_flag(const char* flag, const std::string& text, const char* option, Config& config);

// The options comm.* in the words of that module.
comm::GroupOptions group_options(const Config& config);

// The flags of the learning rate, each of which sets the option schedule.* that it names: as they
// were typed; empty: not given.
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
