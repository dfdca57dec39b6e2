// Runs a program to its end, as a shell would, and keeps everything that it said.
//
// The program starts with this process's environment, less every variable that a launcher of ranks
// sets (tests may themselves run under one), plus what the test adds. A program that is still
// running after the limit is killed with all its children and fails the test by `timed_out`.
//
// Threads: any; Process forks, so call it before other threads exist.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

struct ProcessOptions {
  std::map<std::string, std::string> environment;  // added to ours
  std::filesystem::path directory;                 // empty: ours
  std::chrono::seconds limit{120};
  // Runs in the new process in place of the command, which is then only its name. For many short
  // runs: loading torch takes a third of a second, a fork of a program that has it takes none.
  std::function<int()> body;
};

struct ProcessResult {
  int exit_code = -1;  // 128 + number after a signal, as in a shell
  bool timed_out = false;
  std::string out;
  std::string err;

  std::vector<std::string> err_lines() const;
};

ProcessResult run_process(const std::vector<std::string>& command,
                          const ProcessOptions& options = {});

// A running program: for tests that send signals.
class Process {
 public:
  Process(const std::vector<std::string>& command, const ProcessOptions& options);
  ~Process();  // kills it and its children if it is still running
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  // Reads until `text` has been on stdout or stderr; false if the program ended or the limit came.
  bool wait_for_output(const std::string& text);
  ProcessResult wait();

 private:
  // Takes what is there; false when both pipes are closed. Blocks until something comes.
  bool read_some();
  void kill_all() noexcept;

  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::chrono::steady_clock::time_point deadline_;
  ProcessResult result_;
};

}  // namespace tessera::testing
