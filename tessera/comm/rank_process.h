// One rank's process, from its first line to its last: the other end of a launcher.
//
//   int main(int argc, char** argv) {
//     comm::RankProcess process(comm::process_environment());
//     return process.run([&] { ...; return 0; });
//   }
//
// Launched by our launcher: the process dies with the launcher, also when that is killed -9, and
// its last error goes to the launcher, which shows one rank's error for all. Launched by another,
// or alone: the error is printed here, as "rank 2: ..." or "tessera: ...".
//
// A failed rank leaves with _Exit: threads that are stuck inside the network, and destructors that
// would join them, must not hold up the end of a process whose peers wait for it. What destructors
// would have removed is removed by `clean_up`.
//
// Threads: construct before other threads exist, and use on one thread; run() once.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tessera/comm/rendezvous.h"
#include "tessera/comm/status_store.h"
#include "tessera/core/error.h"

namespace tessera::comm {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitConfig = 2;

// An end for which the program has an exit code of its own.
class ExitCodeError : public Error {
 public:
  ExitCodeError(const std::string& message, int exit_code)
      : Error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

class RankProcess {
 public:
  // Does not return if the launcher is already gone.
  explicit RankProcess(Environment env);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  bool launched_by_us() const { return report_fd_ >= 0; }
  // 0: not launched by us.
  int launcher_pid() const { return launched_by_us() ? launcher_pid_ : 0; }

  // Called before a failed rank leaves; must not throw.
  void set_clean_up(void (*clean_up)()) { clean_up_ = clean_up; }

  // Where a failure of this rank's own is posted, so that the others can name it.
  void set_status(std::shared_ptr<StatusStore> status) { status_ = std::move(status); }
  bool has_status() const { return status_ != nullptr; }

  // Returns what `body` returns. If it throws, reports and leaves: ConfigError with code 2,
  // ExitCodeError with its own, everything else with code 1.
  int run(const std::function<int()>& body);

  // For a rank that a signal has stopped, before it ends by that signal: tells the launcher that
  // all is written and nothing went wrong.
  void report_stopped();

 private:
  [[noreturn]] void fail(const std::exception* error);

  const Environment env_;
  int report_fd_ = -1;
  int launcher_pid_ = 0;
  void (*clean_up_)() = nullptr;
  std::shared_ptr<StatusStore> status_;  // may be null
};

}  // namespace tessera::comm
