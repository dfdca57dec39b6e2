#include "cli/launch/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>

#include <climits>

#include "tessera/core/error.h"
#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

// The link is resolved so that the process is called by its name; if the file was replaced while
// we run (a rebuild), the link itself still leads to the old one.
std::string current_program() {
  constexpr const char* kSelf = "/proc/self/exe";
  std::array<char, PATH_MAX> path;
  const ssize_t length = readlink(kSelf, path.data(), path.size());
  if (length <= 0 || length == static_cast<ssize_t>(path.size())) return kSelf;
  std::string resolved(path.data(), static_cast<std::size_t>(length));
  return access(resolved.c_str(), X_OK) == 0 ? resolved : kSelf;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

class FileActions {
 public:
  FileActions() { posix_spawn_file_actions_init(&actions_); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }
  FileActions(const FileActions&) = delete;
  FileActions& operator=(const FileActions&) = delete;
  posix_spawn_file_actions_t* get() { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

class Attributes {
 public:
  Attributes() { posix_spawnattr_init(&attributes_); }
  ~Attributes() { posix_spawnattr_destroy(&attributes_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
  posix_spawnattr_t* get() { return &attributes_; }

 private:
  posix_spawnattr_t attributes_;
};

}  // namespace

ChildProcess ChildProcess::spawn(const SpawnOptions& options) {
  FileActions actions;
  posix_spawn_file_actions_addopen(actions.get(), STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  // Onto itself: that alone takes the close-on-exec mark away, in the child only.
  if (options.inherited_fd >= 0) {
    posix_spawn_file_actions_adddup2(actions.get(), options.inherited_fd, options.inherited_fd);
  }
  Attributes attributes;
  posix_spawnattr_setflags(attributes.get(), POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(attributes.get(), 0);
  // What the launcher ignores for itself.
  sigset_t usual;
  sigemptyset(&usual);
  sigaddset(&usual, SIGPIPE);
  sigaddset(&usual, SIGXFSZ);
  posix_spawnattr_setsigdefault(attributes.get(), &usual);

  const std::string program = options.program.empty() ? current_program() : options.program;
  pid_t pid = 0;
  const int error = posix_spawn(&pid, program.c_str(), actions.get(), attributes.get(),
                                pointers(options.argv).data(), pointers(options.env).data());
  TESSERA_CHECK(error == 0, CommError, "cannot start ", program, ": ", std::strerror(error),
                error == EAGAIN
                    ? "; the limit of processes is reached: start fewer ranks, or raise "
                      "ulimit -u"
                    : "");
  return ChildProcess(pid);
}

std::optional<ProcessEnd> ChildProcess::take_end() {
  if (ended_) return std::nullopt;
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  kill(-pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  ended_ = true;
  ProcessEnd end;
  if (WIFSIGNALED(status)) {
    end.signal = WTERMSIG(status);
  } else {
    end.exit_code = WEXITSTATUS(status);
  }
  return end;
}

bool ChildProcess::gone() {
  if (!ended_ || gone_) return gone_;
  for (;;) {
    const pid_t reaped = retried([this] { return waitpid(-pid_, nullptr, WNOHANG); });
    if (reaped == 0) return false;
    if (reaped < 0) break;
  }
  gone_ = true;
  return true;
}

void ChildProcess::signal_group(int signal) {
  if (!ended_) kill(-pid_, signal);
}

void ChildProcess::kill_and_reap() {
  if (!ended_) {
    kill(-pid_, SIGKILL);
    retried([this] { return waitpid(pid_, nullptr, 0); });
    ended_ = true;
  }
  while (!gone_) gone_ = retried([this] { return waitpid(-pid_, nullptr, 0); }) < 0;
}

Adoption::Adoption() {
  prctl(PR_GET_CHILD_SUBREAPER, &previous_);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Adoption::~Adoption() { prctl(PR_SET_CHILD_SUBREAPER, previous_); }

}  // namespace tessera::cli
