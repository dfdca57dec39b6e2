#include "cli/config_flags.h"

#include <array>
#include <chrono>

#include <CLI/CLI.hpp>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tessera/core/option_value.h"
#include "tessera/core/printable.h"

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

void add_config_flags(CLI::App& app, ConfigFlags& flags) {
  app.add_option("--config", flags.file, "JSON file with options (tessera options lists them)")
      ->type_name("FILE");
  add_set_flag(app, flags);
}

void add_set_flag(CLI::App& app, ConfigFlags& flags) {
  // One value each time: CLI11 would otherwise take everything that follows.
  app.add_option("--set", flags.settings, "Sets one option; may be given several times")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

Config load_config(const ConfigFlags& flags) {
  Config config = flags.file.empty() ? Config() : Config::from_file(flags.file);
  for (const std::string& setting : flags.settings) {
    const std::size_t equals = setting.find('=');
    TESSERA_CHECK(equals != std::string::npos && equals > 0, ConfigError, "--set ",
                  tessera::in_quotes(setting), " is not NAME=VALUE");
    config.apply_flag(setting);
  }
  return config;
}

void set_from_flag(const char* flag, const std::string& text, const char* option, Config& config) {
  if (!text.empty()) {
    config.set(option, parse_value(*find_option(option), text, flag), flag);
  }
}

comm::GroupOptions group_options(const Config& config) {
  comm::GroupOptions options;
  options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(config.get_seconds("comm.timeout_s")));
  options.pack_below_bytes = static_cast<std::size_t>(config.get_bytes("comm.pack_below_bytes"));
  return options;
}

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
