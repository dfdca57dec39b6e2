#include "tessera/comm/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <utility>

#include "tessera/comm/rank_report.h"
#include "tessera/core/clock.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::optional<int> find_number(const Environment& env, const char* name) {
  const auto found = env.find(name);
  if (found == env.end()) return std::nullopt;
  int value = -1;
  const char* end = found->second.data() + found->second.size();
  const auto [stop, error] = std::from_chars(found->second.data(), end, value);
  TESSERA_CHECK(error == std::errc() && stop == end && value >= 0, ConfigError, name, "='",
                found->second, "' is not what --ranks sets; unset all TESSERA_* variables");
  return value;
}

// The rank as far as the environment tells: the error to be shown may be about just that.
std::optional<int> find_rank(const Environment& env) noexcept {
  try {
    const Rendezvous found = find_rendezvous(env);
    if (found.world_size > 1) return found.rank;
  } catch (const std::exception&) {  // then there is no rank to name
  }
  return std::nullopt;
}

[[noreturn]] void leave(int exit_code) {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

}  // namespace

RankProcess::RankProcess(Environment env) : env_(std::move(env)) {
  const std::optional<int> launcher_pid = find_number(env_, kLauncherPidVariable);
  const std::optional<int> report_fd = find_number(env_, kReportFdVariable);
  if (!launcher_pid || !report_fd) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before that line; then nobody will send the signal.
  if (getppid() != *launcher_pid) {
    std::fprintf(stderr,
                 "tessera: process %d is said to have started this rank, but is not its parent; it "
                 "has died, or a rank started this program: then unset all TESSERA_* before\n",
                 *launcher_pid);
    leave(kExitFailure);
  }
  // Programs that this rank starts must not inherit the report.
  if (fcntl(*report_fd, F_SETFD, FD_CLOEXEC) == 0) report_fd_ = *report_fd;
  launcher_pid_ = *launcher_pid;
}

RankProcess::~RankProcess() {
  if (report_fd_ >= 0) close(report_fd_);
}

int RankProcess::run(const std::function<int()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    fail(&error);
  } catch (...) {
    fail(nullptr);
  }
}

void RankProcess::fail(const std::exception* error) {
  const std::string text = error != nullptr ? error->what() : "an exception of unknown type";
  const bool peer_loss = dynamic_cast<const PeerError*>(error) != nullptr;
  const bool config = dynamic_cast<const ConfigError*>(error) != nullptr;
  const auto* const own_code = dynamic_cast<const ExitCodeError*>(error);

  RankReport report{peer_loss ? FailureKind::kPeerLoss : FailureKind::kCause,
                    SteadyClock().now_ns(), text};
  const std::optional<int> rank = find_rank(env_);
  if (report_fd_ < 0 || !write_report(report_fd_, report)) {
    const std::string who = rank ? "rank " + std::to_string(*rank) : "tessera";
    std::fprintf(stderr, "%s: %s\n", who.c_str(), text.c_str());
  }
  // A consequence is not posted: the others shall read the cause.
  if (status_ && rank && !peer_loss) status_->post_failure(*rank, RankFailure{text});
  if (clean_up_ != nullptr) clean_up_();
  leave(config ? kExitConfig : own_code != nullptr ? own_code->exit_code() : kExitFailure);
}

void RankProcess::report_stopped() {
  if (report_fd_ >= 0) {
    write_report(report_fd_, {FailureKind::kStopped, SteadyClock().now_ns(), "stopped"});
  }
}

}  // namespace tessera::comm
