#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/launch/launch_store.h"
#include "cli/launch/launcher.h"
#include "cli/local_ranks.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

struct LaunchFlags {
  std::string ranks = "1";
  Arguments command;  // the program and its own arguments
};

// As a shell finds it. Checked here, once: a rank that cannot start would say so N times.
std::string find_program(const std::string& name) {
  std::vector<std::string> candidates;
  if (name.find('/') != std::string::npos) {
    candidates.push_back(name);
  } else if (const char* path = std::getenv("PATH")) {
    std::istringstream folders{std::string(path)};
    for (std::string folder; std::getline(folders, folder, ':');) {
      candidates.push_back((folder.empty() ? "." : folder) + "/" + name);
    }
  }
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) {
      return candidate;
    }
  }
  throw ConfigError("launch: there is no program " + tessera::in_quotes(name) +
                    " that can be run; give its path");
}

int run_launch(const LaunchFlags& flags) {
  TESSERA_CHECK(!flags.command.empty(), ConfigError,
                "launch: no program was given; tessera launch --ranks 2 ./train");
  check_no_rendezvous(comm::process_environment());
  LaunchOptions options;
  options.num_ranks = parse_ranks(flags.ranks);
  options.argv = flags.command;
  options.program = find_program(flags.command.front());
  const int num_ranks = options.num_ranks;
  options.serve_store = [num_ranks] { return serve_launch_store(num_ranks, kStoreTimeout); };
  return end_as(launch_local_ranks(options));
}

}  // namespace

Action add_launch(CLI::App& app) {
  auto flags = std::make_shared<LaunchFlags>();
  add_ranks_flag(app, flags->ranks);
  app.add_option("PROGRAM", flags->command, "The program to run once per rank, and its arguments");
  app.positionals_at_end();  // what follows the program is the program's own
  return [flags](const Arguments&) { return run_launch(*flags); };
}

}  // namespace tessera::cli
