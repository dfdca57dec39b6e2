// One started program and its process group: everything that it starts, unless that leaves the
// group on purpose.
//
// Ending is in two steps. First the program itself ends; whatever is left of its group is killed
// while the dead program still holds the group's number, so the signal cannot hit a stranger.
// Then the group's orphans, which this process adopts (Adoption), are reaped.
//
// Threads: one thread, the one that started it: the kernel ties the death signal
// (comm/rank_process.h) to that thread.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

struct ProcessEnd {
  int exit_code = 0;
  int signal = 0;
};

struct SpawnOptions {
  std::string program;  // path; empty: the program that runs now
  std::vector<std::string> argv;
  std::vector<std::string> env;  // "NAME=value"
  int inherited_fd = -1;         // stays open in the child, under its own number
};

class ChildProcess {
 public:
  // Input comes from nowhere: a group in the background that reads the terminal would be stopped.
  // Output is inherited. Throws CommError with the system's reason.
  static ChildProcess spawn(const SpawnOptions& options);

  ChildProcess(ChildProcess&&) = default;
  ChildProcess& operator=(ChildProcess&&) = delete;

  pid_t pid() const { return pid_; }
  // Looks, without blocking, whether the program has ended since the last look.
  std::optional<ProcessEnd> take_end();
  // True when the program and its group are reaped. Never blocks.
  bool gone();
  // To the whole group. Nothing once the program has ended.
  void signal_group(int signal);
  // Blocks until all of the group are gone.
  void kill_and_reap();

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_;
  bool ended_ = false;
  bool gone_ = false;
};

// While it lives, orphaned descendants become children of this process, which can reap them.
class Adoption {
 public:
  Adoption();
  ~Adoption();
  Adoption(const Adoption&) = delete;
  Adoption& operator=(const Adoption&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace tessera::cli
