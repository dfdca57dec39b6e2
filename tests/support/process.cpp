#include "tests/support/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string_view>

extern char** environ;

namespace tessera::testing {
namespace {

bool set_by_a_launcher(std::string_view name) {
  constexpr std::array<std::string_view, 7> kExact{
      "RANK",        "WORLD_SIZE",  "LOCAL_RANK", "LOCAL_WORLD_SIZE",
      "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"};
  constexpr std::array<std::string_view, 7> kPrefixes{"TESSERA_", "OMPI_",  "PMI_",         "PMIX_",
                                                      "MPI_",     "SLURM_", "TORCHELASTIC_"};
  for (const std::string_view exact : kExact) {
    if (name == exact) {
      return true;
    }
  }
  for (const std::string_view prefix : kPrefixes) {
    if (name.substr(0, prefix.size()) == prefix) {
      return true;
    }
  }
  return false;
}

std::vector<std::string> environment_of(const ProcessOptions& options) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string name(text.substr(0, text.find('=')));
    if (!set_by_a_launcher(name) && options.environment.count(name) == 0) {
      entries.emplace_back(text);
    }
  }
  for (const auto& [name, value] : options.environment) {
    entries.push_back(name + "=" + value);
  }
  return entries;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) {
    pointers.push_back(text.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

void make_pipe(int (&ends)[2]) {
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::runtime_error(std::string("pipe2: ") + std::strerror(errno));
  }
}

}  // namespace

std::vector<std::string> ProcessResult::err_lines() const {
  std::vector<std::string> lines;
  std::istringstream in(err);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
  }
  return lines;
}

Process::Process(const std::vector<std::string>& command, const ProcessOptions& options)
    : deadline_(std::chrono::steady_clock::now() + options.limit) {
  std::vector<std::string> arguments = command;
  std::vector<std::string> entries = environment_of(options);
  const std::vector<char*> argv = pointers_to(arguments);
  const std::vector<char*> envp = pointers_to(entries);
  int out[2];
  int err[2];
  make_pipe(out);
  make_pipe(err);
  pid_ = ::fork();
  if (pid_ == 0) {
    // Only calls that are allowed between fork and exec, as far as there are other threads.
    ::setpgid(0, 0);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    if (!options.directory.empty() && ::chdir(options.directory.c_str()) != 0) {
      ::_exit(126);
    }
    if (options.body) {
      ::clearenv();
      for (std::string& entry : entries) {
        ::putenv(entry.data());
      }
      ::_exit(options.body());
    }
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  out_fd_ = out[0];
  err_fd_ = err[0];
  if (pid_ < 0) {
    throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  }
  ::setpgid(pid_, pid_);
}

Process::~Process() {
  if (pid_ > 0) {
    kill_all();
    ::waitpid(pid_, nullptr, 0);
  }
  for (const int fd : {out_fd_, err_fd_}) {
    if (fd >= 0) {
      ::close(fd);
    }
  }
}

void Process::kill_all() noexcept { ::kill(-pid_, SIGKILL); }

bool Process::read_some() {
  if (out_fd_ < 0 && err_fd_ < 0) {
    return false;
  }
  std::array<pollfd, 2> fds{{{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}}};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline_ - std::chrono::steady_clock::now());
  const int ready =
      left.count() > 0 ? ::poll(fds.data(), fds.size(), static_cast<int>(left.count())) : 0;
  if (ready < 0 && errno == EINTR) {
    return true;
  }
  if (ready <= 0) {
    result_.timed_out = true;
    return false;
  }
  std::array<char, 65536> buffer;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].fd < 0 || fds[i].revents == 0) {
      continue;
    }
    const ssize_t count = ::read(fds[i].fd, buffer.data(), buffer.size());
    if (count > 0) {
      (i == 0 ? result_.out : result_.err).append(buffer.data(), count);
    } else if (count == 0 || errno != EINTR) {
      ::close(fds[i].fd);
      (i == 0 ? out_fd_ : err_fd_) = -1;
    }
  }
  return true;
}

bool Process::wait_for_output(const std::string& text) {
  while (result_.out.find(text) == std::string::npos &&
         result_.err.find(text) == std::string::npos) {
    if (!read_some()) {
      return false;
    }
  }
  return true;
}

ProcessResult Process::wait() {
  while (read_some()) {
  }
  if (result_.timed_out) {
    kill_all();
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  result_.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result_;
}

ProcessResult run_process(const std::vector<std::string>& command, const ProcessOptions& options) {
  return Process(command, options).wait();
}

}  // namespace tessera::testing
