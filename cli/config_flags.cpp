#include "cli/config_flags.h"

#include <chrono>

#include <CLI/CLI.hpp>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tessera/core/option_value.h"
#include "tessera/core/printable.h"

namespace tessera::cli {

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

}  // namespace tessera::cli
