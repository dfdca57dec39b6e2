#include "cli/launch/signal_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

// A handler has no argument of ours; this is the only way to reach the pipe from it.
std::atomic<int> handler_fd{-1};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler must not wait for a lock");

void write_signal(int signal) {
  const int saved_errno = errno;
  const auto byte = static_cast<unsigned char>(signal);
  // A full pipe loses nothing that matters: its reader is about to wake anyway.
  [[maybe_unused]] const ssize_t done = write(handler_fd.load(), &byte, 1);
  errno = saved_errno;
}

}  // namespace

SignalPipe::SignalPipe(const std::vector<int>& signals) {
  int ends[2];
  TESSERA_CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, CommError,
                "launcher: no pipe for signals: ", std::strerror(errno));
  read_fd_ = ends[0];
  write_fd_ = ends[1];
  int expected = -1;
  const bool first = handler_fd.compare_exchange_strong(expected, write_fd_);
  if (!first) {
    close(read_fd_);
    close(write_fd_);
  }
  TESSERA_INVARIANT(first, "two launchers in one process");
  for (const int signal : signals) {
    struct sigaction previous {};
    sigaction(signal, nullptr, &previous);
    if (previous.sa_handler == SIG_IGN && signal != SIGCHLD) continue;
    struct sigaction action {};
    action.sa_handler = write_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, &action, &previous) == 0) previous_.emplace_back(signal, previous);
  }
}

SignalPipe::~SignalPipe() {
  for (const auto& [signal, previous] : previous_) sigaction(signal, &previous, nullptr);
  handler_fd.store(-1);
  close(read_fd_);
  close(write_fd_);
}

std::vector<int> SignalPipe::take() {
  std::vector<int> signals;
  unsigned char bytes[64];
  for (;;) {
    const ssize_t count = retried([&] { return read(read_fd_, bytes, sizeof(bytes)); });
    if (count <= 0) return signals;
    signals.insert(signals.end(), bytes, bytes + count);
  }
}

}  // namespace tessera::cli
