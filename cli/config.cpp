#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/config_flags.h"

namespace tessera::cli {
namespace {

int run_config(const ConfigFlags& flags) {
  const Config config = load_config(flags);
  config.check();
  for (const std::string& notice : config.notices()) {
    std::cout << "note: " << notice << "\n";
  }
  const std::string settings = config.describe();
  std::cout << settings;
  std::cout << (settings.empty() ? "Every option has its default (tessera options).\n"
                                 : "Every other option has its default (tessera options).\n");
  return kExitOk;
}

}  // namespace

Action add_config(CLI::App& app) {
  auto flags = std::make_shared<ConfigFlags>();
  app.add_option("FILE", flags->file, "JSON with Tessera's options or DeepSpeed's keys")
      ->required()
      ->type_name("");
  add_set_flag(app, *flags);
  return [flags](const Arguments&) { return run_config(*flags); };
}

}  // namespace tessera::cli
