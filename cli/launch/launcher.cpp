#include "cli/launch/launcher.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <limits>
#include <optional>
#include <utility>

#include "cli/launch/child_process.h"
#include "cli/launch/rank_end.h"
#include "cli/launch/signal_pipe.h"
#include "tessera/comm/rank_report.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::cli {
namespace {

constexpr const char* kThreadsVariable = "OMP_NUM_THREADS";

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

std::vector<std::string> to_texts(const comm::Environment& env) {
  std::vector<std::string> texts;
  for (const auto& [name, value] : env) texts.push_back(name + "=" + value);
  return texts;
}

// A file descriptor that closes itself.
class OwnedFd {
 public:
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&&) = delete;
  ~OwnedFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Ignores a signal while it lives.
class IgnoredSignal {
 public:
  explicit IgnoredSignal(int signal) : signal_(signal) {
    struct sigaction action {};
    action.sa_handler = SIG_IGN;
    sigemptyset(&action.sa_mask);
    sigaction(signal_, &action, &previous_);
  }
  ~IgnoredSignal() { sigaction(signal_, &previous_, nullptr); }
  IgnoredSignal(const IgnoredSignal&) = delete;
  IgnoredSignal& operator=(const IgnoredSignal&) = delete;

 private:
  const int signal_;
  struct sigaction previous_ {};
};

struct Rank {
  ChildProcess process;
  OwnedFd report;
};

enum class Phase : std::uint8_t { kRunning, kStopping, kSettling, kGrace, kTerminating, kKilled };

class Launch {
 public:
  explicit Launch(const LaunchOptions& options)
      : options_(checked(options)), signals_({SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
    store_ = options_.serve_store();
  }

  // Ranks are left here only if starting the last of them threw.
  ~Launch() {
    for (Rank& rank : ranks_) rank.process.kill_and_reap();
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  int run() {
    start_ranks();
    for (bool all_gone = false; !all_gone;) {
      wait_for_event();
      for (const int signal : signals_.take()) {
        if (signal != SIGCHLD) stop_on(signal);
      }
      all_gone = collect_ends();
      if (phase_ == Phase::kSettling && num_running_ == 0) announce_root();
      // Orphans that were killed with their rank, and do not end.
      if (num_running_ == 0 && !all_gone && !deadline_ns_) enter(Phase::kKilled, options_.reap);
      if (deadline_ns_ && clock_.now_ns() >= *deadline_ns_ && !all_gone) advance();
    }
    if (!announced_) announce_root();
    if (stop_signal_ != 0) return 128 + stop_signal_;
    const std::optional<std::size_t> root = find_root_cause(failures_);
    return root ? failures_[*root].shell_code() : stop_code_;
  }

 private:
  // Said before anything is opened, and not by the call that fails: the store's server has nobody
  // to tell, and its clients would wait.
  static const LaunchOptions& checked(const LaunchOptions& options) {
    constexpr std::uint64_t kPerRank = 5;  // a report, and the connections of a rank to the store
    constexpr std::uint64_t kOther = 16;   // the server, signals, starting a process
    const std::uint64_t needed =
        num_open_files() + kOther + kPerRank * static_cast<std::uint64_t>(options.num_ranks);
    raise_open_file_limit(needed);
    TESSERA_CHECK(needed <= open_file_limit(), ConfigError, "launcher: watching ",
                  options.num_ranks, " ranks takes ", needed, " open files and connections",
                  open_files_remedy());
    return options;
  }

  void print(const std::string& line) const {
    if (options_.print) {
      options_.print(line);
    } else {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  }

  void start_ranks() {
    comm::Environment env = comm::process_environment();
    if (env[kThreadsVariable].empty()) {
      const int cores = num_usable_cores();
      const int threads = std::max(1, cores / options_.num_ranks);
      env[kThreadsVariable] = std::to_string(threads);
      print(detail::concat("launcher: ", kThreadsVariable, "=", threads,
                           " in each rank (ranks: ", options_.num_ranks, ", cores: ", cores,
                           "); set it to choose another number"));
    }
    env["TESSERA_WORLD_SIZE"] = std::to_string(options_.num_ranks);
    env["TESSERA_STORE_HOST"] = store_.host;
    env["TESSERA_STORE_PORT"] = std::to_string(store_.port);
    env[comm::kSecretVariable] = store_.secret;
    env[comm::kLauncherPidVariable] = std::to_string(getpid());
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
      OwnedFd report(comm::make_report_file());
      env["TESSERA_RANK"] = std::to_string(rank);
      env[comm::kReportFdVariable] = std::to_string(report.get());
      ChildProcess process =
          ChildProcess::spawn({options_.program, options_.argv, to_texts(env), report.get()});
      ranks_.push_back(Rank{std::move(process), std::move(report)});
    }
    num_running_ = options_.num_ranks;
  }

  void wait_for_event() const {
    int timeout_ms = -1;
    if (deadline_ns_) {
      const std::int64_t left_ns = std::max<std::int64_t>(0, *deadline_ns_ - clock_.now_ns());
      const std::int64_t left_ms = (left_ns + 999999) / 1000000;
      timeout_ms =
          static_cast<int>(std::min<std::int64_t>(left_ms, std::numeric_limits<int>::max()));
    }
    pollfd signal_end{signals_.fd(), POLLIN, 0};
    poll(&signal_end, 1, timeout_ms);
  }

  // True when all ranks, and what they started, are gone.
  bool collect_ends() {
    bool all_gone = true;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (const auto end = ranks_[i].process.take_end()) {
        --num_running_;
        on_end(RankEnd{static_cast<int>(i), end->exit_code, end->signal, clock_.now_ns(),
                       comm::read_report(ranks_[i].report.get())});
      }
      all_gone = ranks_[i].process.gone() && all_gone;
    }
    return all_gone;
  }

  void on_end(RankEnd end) {
    // Whoever ends after our own signal says nothing about the cause.
    if (!end.failed() || phase_ >= Phase::kTerminating) return;
    if (end.is_stop()) {
      stop_code_ = end.shell_code();
      return;
    }
    if (stop_signal_ != 0 && end.shell_code() == 128 + stop_signal_) {
      // As told, but it may have left others behind in a call: it need not be a rank of ours.
      if (store_.status)
        store_.status->post_failure(end.rank, comm::RankFailure{describe_cause(end)});
      return;
    }
    if (stop_signal_ != 0 && end.is_consequence()) return;
    if (store_.status && !end.is_consequence()) {
      store_.status->post_failure(end.rank, comm::RankFailure{describe_cause(end)});
    }
    if (!announced_) failures_.push_back(std::move(end));
    if (phase_ < Phase::kSettling) enter(Phase::kSettling, options_.settle);
  }

  void enter(Phase phase, std::chrono::milliseconds limit) {
    phase_ = phase;
    deadline_ns_ = clock_.now_ns() + std::chrono::nanoseconds(limit).count();
  }

  // The time of this phase is over.
  void advance() {
    switch (phase_) {
      case Phase::kRunning:
        deadline_ns_.reset();
        break;
      case Phase::kSettling:
        announce_root();
        break;
      case Phase::kGrace:
        signal_all(SIGTERM);
        enter(Phase::kTerminating, options_.terminate);
        break;
      case Phase::kStopping:
      case Phase::kTerminating:
        signal_all(SIGKILL);
        enter(Phase::kKilled, options_.reap);
        break;
      case Phase::kKilled:
        give_up();
        break;
    }
  }

  void announce_root() {
    announced_ = true;
    const std::optional<std::size_t> root = find_root_cause(failures_);
    if (!root) return;
    print(describe_end(failures_[*root]));
    // Also a consequence is posted, if nobody has anything better to say.
    if (store_.status) {
      store_.status->post_failure(failures_[*root].rank,
                                  comm::RankFailure{describe_cause(failures_[*root])});
    }
    if (phase_ == Phase::kSettling) enter(Phase::kGrace, options_.grace);
  }

  void stop_on(int signal) {
    if (stop_signal_ != 0) {
      signal_all(SIGKILL);
      enter(Phase::kKilled, options_.reap);
      return;
    }
    stop_signal_ = signal;
    print(detail::concat("launcher: ", signal_name(signal), ": stopping ", num_running_,
                         num_running_ == 1 ? " rank" : " ranks", "; a second signal kills them"));
    signal_all(signal);
    if (phase_ != Phase::kRunning) {  // a rank has failed, and what would be saved is lost
      enter(Phase::kTerminating, options_.terminate);
      return;
    }
    phase_ = Phase::kStopping;
    if (options_.stop) enter(Phase::kStopping, *options_.stop);
  }

  void signal_all(int signal) {
    for (Rank& rank : ranks_) rank.process.signal_group(signal);
  }

  // SIGKILL has not helped: the kernel holds the process, in a disk or a driver.
  [[noreturn]] void give_up() {
    std::string pids;
    for (Rank& rank : ranks_) {
      if (!rank.process.gone()) pids += " " + std::to_string(rank.process.pid());
    }
    ranks_.clear();
    throw CommError(detail::concat("launcher: processes", pids, " do not end ",
                                   options_.reap.count(),
                                   " ms after SIGKILL; the kernel holds "
                                   "them, in a disk or a driver: see dmesg"));
  }

  const LaunchOptions& options_;
  const SteadyClock clock_;
  const Adoption adoption_;
  const IgnoredSignal no_sigpipe_{SIGPIPE};  // a closed standard error must not end the ranks
  SignalPipe signals_;
  LaunchStore store_;
  std::vector<Rank> ranks_;
  int num_running_ = 0;
  Phase phase_ = Phase::kRunning;
  std::optional<std::int64_t> deadline_ns_;
  std::vector<RankEnd> failures_;  // until the root cause was announced or a signal sent
  bool announced_ = false;
  int stop_signal_ = 0;  // that this process got
  int stop_code_ = 0;    // of ranks that were stopped
};

}  // namespace

int launch_local_ranks(const LaunchOptions& options) {
  TESSERA_CHECK(options.num_ranks >= 1, ConfigError, "--ranks=", options.num_ranks,
                ": at least one rank is needed");
  TESSERA_INVARIANT(!options.argv.empty() && options.serve_store,
                    "launcher: argv and serve_store must be given");
  check_no_rendezvous(comm::process_environment());
  return Launch(options).run();
}

void check_no_rendezvous(const comm::Environment& env) {
  const comm::Rendezvous found = comm::find_rendezvous(env);
  TESSERA_CHECK(found.source == comm::RendezvousSource::kNone || found.world_size == 1, ConfigError,
                "--ranks starts ranks of its own, but this process is already rank ", found.rank,
                " of ", found.world_size, ", started by ", to_string(found.source),
                "; leave --ranks out, or start the program without ", to_string(found.source));
}

}  // namespace tessera::cli
