#include "cli/schedule_flags.h"

#include <array>

#include <CLI/CLI.hpp>

#include "cli/config_flags.h"
#include "tessera/core/config.h"

namespace tessera::cli {
namespace {

struct ScheduleFlag {
  const char* name;
  const char* option;
  std::string ScheduleFlags::*text;
  const char* type;
  const char* help;
};

constexpr std::array kFlags = {
    ScheduleFlag{"--schedule", "schedule.kind", &ScheduleFlags::kind, "NAME",
                 "constant (default), linear, cosine, one_cycle or range_test; sets schedule.kind"},
    ScheduleFlag{"--warmup", "schedule.warmup_steps", &ScheduleFlags::warmup, "N",
                 "Steps of warm-up (default 0); sets schedule.warmup_steps"},
    ScheduleFlag{"--warmup-shape", "schedule.warmup_shape", &ScheduleFlags::warmup_shape, "NAME",
                 "linear (default) or log; sets schedule.warmup_shape"},
    ScheduleFlag{"--lr-start", "schedule.warmup_start_lr", &ScheduleFlags::start_lr, "X",
                 "First learning rate of a warm-up (default 0); sets schedule.warmup_start_lr"},
    ScheduleFlag{"--lr-min", "schedule.final_lr", &ScheduleFlags::min_lr, "X",
                 "Last learning rate of linear and cosine (default 0); sets schedule.final_lr"},
    ScheduleFlag{"--schedule-steps", "schedule.total_steps", &ScheduleFlags::steps, "N",
                 "Step at which linear and cosine end (default: --steps); sets "
                 "schedule.total_steps"},
};

}  // namespace

void add_schedule_flags(CLI::App& app, ScheduleFlags& flags) {
  constexpr const char* kGroup = "Learning rate (tessera options lists the other schedule.*)";
  if (CLI::Option* const lr = app.get_option_no_throw("--lr")) {
    lr->group(kGroup);
  }
  for (const ScheduleFlag& flag : kFlags) {
    app.add_option(flag.name, flags.*flag.text, flag.help)->type_name(flag.type)->group(kGroup);
  }
}

void apply_schedule_flags(const ScheduleFlags& flags, Config& config) {
  for (const ScheduleFlag& flag : kFlags) {
    set_from_flag(flag.name, flags.*flag.text, flag.option, config);
  }
}

}  // namespace tessera::cli
