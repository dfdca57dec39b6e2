// SIGINT, SIGTERM and SIGHUP of a process that trains: the first asks it to stop behind its step,
// the second ends it at once.
//
//   set-up    every signal ends the process at once
//   deferred  the first is noted, and whoever trains asks pending(); the second ends the process
//   closing   all has been written: further signals are dropped, so that none cuts the clean-up
//
// A launcher of ours passes on the signal that it got. Where all processes of a job are told at
// once (a control group, `kill` of a process group) a rank gets it twice: so what comes from the
// launcher never counts as the second. The launcher's own second signal is SIGKILL.
//
// Ending at once calls `clean_up`, then ends by the signal itself, so that a parent sees which one
// it was; process 1 of a container, which signals do not end, exits with 128 + signal.
//
// Dispositions belong to the process, and so does this: at most one exists at a time. A signal that
// was ignored before (nohup ignores SIGHUP) stays ignored.
//
// Threads: construct, destroy and switch on one thread; handlers run on any.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <utility>
#include <vector>

namespace tessera::cli {

struct StopOptions {
  pid_t launcher_pid = 0;  // 0: no launcher of ours
  // Called in a signal handler: async-signal-safe, and never blocks. Null: nothing to clean up.
  void (*clean_up)() = nullptr;
  // Says on standard error that the first signal was taken; the launcher says so for its ranks.
  bool says_so = true;
};

class StopSignals {
 public:
  explicit StopSignals(const StopOptions& options);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From set-up to deferred.
  void defer();
  // The first signal that was deferred; 0: none.
  int pending() const;
  // From deferred to closing.
  void close();

 private:
  std::vector<std::pair<int, struct sigaction>> previous_;
};

// Ends this process by `signal`, or with 128 + signal where that does not end it. Flushes nothing.
[[noreturn]] void end_by_signal(int signal);

}  // namespace tessera::cli
