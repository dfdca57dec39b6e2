// `--ranks N`: starts N local ranks by executing this program again, and stays to watch them.
//
// The launcher holds the store, so it outlives any rank; the kernel chooses its port, so none can
// be stuck. It does no training itself and returns when every rank and all that the ranks started
// are gone:
//
//   running --rank fails--> settling --> grace ----> terminating ---> killed
//                           who began?   the others   SIGTERM          SIGKILL
//                                        may end
//   running --signal------> stopping: that signal to all ranks, which finish their step and save;
//                           a rank that fails meanwhile: settling; a second signal: killed
//
// The root cause is shown once, after settling; what the other ranks report is its consequence and
// is not shown. Each failure is posted in the status store at once, so that waiting ranks can name
// it.
//
// If the launcher itself is killed, its ranks die with it (comm/rank_process.h).
//
// Threads: call it from a thread that lives as long as the call, one call at a time per process.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/launch_store.h"
#include "tessera/comm/rendezvous.h"

namespace tessera::cli {

struct LaunchOptions {
  int num_ranks = 1;
  // Of every rank: the program's name first, and without the flag that asked for ranks.
  std::vector<std::string> argv;
  std::string program;  // path; empty: this program
  // Called once signals are caught.
  std::function<LaunchStore()> serve_store;

  // After a failure: nobody waits longer for the end of a run that is lost.
  std::chrono::milliseconds settle{200};      // for other reports, before the root cause is chosen
  std::chrono::milliseconds grace{300};       // for the other ranks to end by themselves
  std::chrono::milliseconds terminate{1000};  // between SIGTERM and SIGKILL
  std::chrono::milliseconds reap{10000};      // for the kernel, after SIGKILL
  // Between a signal that stops the run and SIGKILL. Null: a step, and saving, take what they take.
  std::optional<std::chrono::milliseconds> stop;

  // Takes one line. Empty: standard error.
  std::function<void(const std::string&)> print;
};

// The exit code for the program: 0, that of the rank which failed first (128 + signal if it was
// killed), or 128 + signal if the launcher, or a rank, was told to stop. ConfigError if another
// launcher has already started this process as one of several ranks.
int launch_local_ranks(const LaunchOptions& options);

// For `--ranks N`: a ConfigError if another launcher has already started several ranks.
void check_no_rendezvous(const comm::Environment& env);

}  // namespace tessera::cli
