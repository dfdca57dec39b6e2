// Signals as bytes in a pipe, so that one poll() waits for them and for time alike.
//
// Signal dispositions belong to the process, and so does this: at most one SignalPipe exists at a
// time. Handlers rather than signalfd, because a library that is loaded with us may have started
// threads before us that block nothing: they would take the signal and end the process.
//
// Threads: construct and destroy on one thread; handlers run on any.
#pragma once

#include <csignal>
#include <utility>
#include <vector>

namespace tessera::cli {

class SignalPipe {
 public:
  // A signal that was ignored (nohup ignores SIGHUP) stays ignored, except SIGCHLD.
  explicit SignalPipe(const std::vector<int>& signals);
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  // Readable when a signal has arrived.
  int fd() const { return read_fd_; }
  // The signals since the last call, oldest first. Never blocks.
  std::vector<int> take();

 private:
  int read_fd_ = -1;
  int write_fd_ = -1;
  std::vector<std::pair<int, struct sigaction>> previous_;
};

}  // namespace tessera::cli
