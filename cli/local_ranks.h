// `--ranks N`, for every command that runs ranks: starts them as local processes.
//
// Without the flag a command joins the ranks that torchrun, mpirun or srun has started, or is a
// world of one; with it and another launcher's variables it is an error.
//
// Threads: main thread only.
#pragma once

#include <chrono>
#include <string>

#include "cli/command.h"

namespace tessera::cli {

// On loopback, to a server in the launcher itself.
constexpr std::chrono::milliseconds kStoreTimeout{30000};

// Adds the flag; its text goes to `ranks`.
void add_ranks_flag(CLI::App& app, std::string& ranks);

int parse_ranks(const std::string& text);

// Executes the same command line once per rank, without --ranks; gives the exit code of all.
int start_local_ranks(int num_ranks, const Arguments& arguments);

// Gives the code back, or does not return where it says that a signal has stopped the run: then
// this process ends by that signal, so that a shell script around it stops, too.
int end_as(int exit_code);

// What start_local_ranks() gives to its ranks.
Arguments without_ranks_flag(const Arguments& arguments);

}  // namespace tessera::cli
