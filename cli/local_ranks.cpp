#include "cli/local_ranks.h"

#include <csignal>
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>

#include "cli/flag_values.h"
#include "cli/launch/launch_store.h"
#include "cli/launch/launcher.h"
#include "cli/launch/stop_signals.h"

namespace tessera::cli {
namespace {

// Processes on one machine: more is a slip of the finger.
constexpr int kMaxLocalRanks = 1024;
constexpr const char* kFlag = "--ranks";

}  // namespace

void add_ranks_flag(CLI::App& app, std::string& ranks) {
  app.add_option(kFlag, ranks,
                 "Starts N ranks on this machine (default: those of torchrun, mpirun or srun)")
      ->type_name("N");
}

int parse_ranks(const std::string& text) {
  return static_cast<int>(parse_count(kFlag, text, 1, kMaxLocalRanks));
}

Arguments without_ranks_flag(const Arguments& arguments) {
  const std::string flag = kFlag;
  Arguments rest;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == flag) {
      ++i;
    } else if (arguments[i].rfind(flag + "=", 0) != 0) {
      rest.push_back(arguments[i]);
    }
  }
  return rest;
}

int start_local_ranks(int num_ranks, const Arguments& arguments) {
  LaunchOptions options;
  options.num_ranks = num_ranks;
  options.argv = without_ranks_flag(arguments);
  options.serve_store = [num_ranks] { return serve_launch_store(num_ranks, kStoreTimeout); };
  return end_as(launch_local_ranks(options));
}

int end_as(int exit_code) {
  const int signal = exit_code - 128;
  if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
    std::cout.flush();
    std::fflush(nullptr);
    end_by_signal(signal);
  }
  return exit_code;
}

}  // namespace tessera::cli
