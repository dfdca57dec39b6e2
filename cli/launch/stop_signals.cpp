#include "cli/launch/stop_signals.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

enum class Mode : int { kNone, kSetUp, kDeferred, kClosing };

// A handler has no argument of ours: what it needs is here.
std::atomic<Mode> mode{Mode::kNone};
std::atomic<int> first_signal{0};
std::atomic<int> num_from_others{0};  // not from the launcher
std::atomic<pid_t> launcher{0};
std::atomic<void (*)()> clean_up{nullptr};
std::atomic<bool> says_so{false};
static_assert(std::atomic<void (*)()>::is_always_lock_free &&
                  std::atomic<Mode>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free,
              "a signal handler must not wait for a lock");

void say_in_handler() {
  constexpr char kText[] =
      "tessera: told to stop: finishes the step and saves; once more ends it at once\n";
  [[maybe_unused]] const ssize_t done = write(STDERR_FILENO, kText, sizeof(kText) - 1);
}

void end_at_once(int signal) {
  if (const auto hook = clean_up.load()) hook();
  end_by_signal(signal);
}

void on_signal(int signal, siginfo_t* info, void* /*context*/) {
  const int saved_errno = errno;
  switch (mode.load()) {
    case Mode::kSetUp:
      end_at_once(signal);
      break;
    case Mode::kDeferred: {
      int none = 0;
      const bool is_first = first_signal.compare_exchange_strong(none, signal);
      const bool from_launcher = launcher.load() != 0 && info->si_pid == launcher.load();
      if (!from_launcher && num_from_others.fetch_add(1) > 0) end_at_once(signal);
      if (is_first && says_so.load()) say_in_handler();
      break;
    }
    case Mode::kNone:
    case Mode::kClosing:
      break;
  }
  errno = saved_errno;
}

}  // namespace

StopSignals::StopSignals(const StopOptions& options) {
  Mode none = Mode::kNone;
  TESSERA_INVARIANT(mode.compare_exchange_strong(none, Mode::kSetUp),
                    "two owners of the stop signals in one process");
  first_signal = 0;
  num_from_others = 0;
  launcher = options.launcher_pid;
  clean_up = options.clean_up;
  says_so = options.says_so;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction previous {};
    sigaction(signal, nullptr, &previous);
    if (previous.sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, &action, &previous) == 0) previous_.emplace_back(signal, previous);
  }
}

StopSignals::~StopSignals() {
  for (const auto& [signal, previous] : previous_) sigaction(signal, &previous, nullptr);
  mode = Mode::kNone;
}

void StopSignals::defer() { mode = Mode::kDeferred; }

int StopSignals::pending() const { return first_signal.load(); }

void StopSignals::close() { mode = Mode::kClosing; }

void end_by_signal(int signal) {
  // As in a handler: only what is async-signal-safe.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal);
  _exit(128 + signal);
}

}  // namespace tessera::cli
