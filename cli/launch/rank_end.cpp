#include "cli/launch/rank_end.h"

#include <csignal>
#include <tuple>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

const char* remedy(int signal) {
  switch (signal) {
    case SIGKILL:
      return "; the kernel does that when memory runs out: see dmesg";
    case SIGSEGV:
    case SIGBUS:
    case SIGILL:
    case SIGFPE:
    case SIGABRT:
      return "; this is a defect: its core dump or a debugger shows where";
    default:
      return "";
  }
}

}  // namespace

std::string signal_name(int signal) {
  // sigabbrev_np is newer than some of the C libraries that we build with.
  switch (signal) {
    case SIGHUP:
      return "SIGHUP";
    case SIGINT:
      return "SIGINT";
    case SIGQUIT:
      return "SIGQUIT";
    case SIGILL:
      return "SIGILL";
    case SIGTRAP:
      return "SIGTRAP";
    case SIGABRT:
      return "SIGABRT";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGKILL:
      return "SIGKILL";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGUSR2:
      return "SIGUSR2";
    case SIGPIPE:
      return "SIGPIPE";
    case SIGALRM:
      return "SIGALRM";
    case SIGTERM:
      return "SIGTERM";
    case SIGXCPU:
      return "SIGXCPU";
    case SIGXFSZ:
      return "SIGXFSZ";
    case SIGSYS:
      return "SIGSYS";
    default:
      return "signal " + std::to_string(signal);
  }
}

bool RankEnd::is_consequence() const {
  return signal == 0 && report && report->kind == comm::FailureKind::kPeerLoss;
}

std::string describe_cause(const RankEnd& end) {
  if (end.signal != 0) {
    const std::string said = end.report ? "; it had reported: " + end.report->text : "";
    return detail::concat("killed by signal ", end.signal, " (", signal_name(end.signal), ")",
                          said.empty() ? remedy(end.signal) : said);
  }
  if (end.report) return end.report->text;
  return detail::concat("exited with code ", end.exit_code,
                        " without an error message to the launcher; see its output above");
}

std::string describe_end(const RankEnd& end) {
  const char* verb = end.signal != 0 ? " was " : end.report ? " failed: " : " ";
  return detail::concat("rank ", end.rank, verb, describe_cause(end));
}

std::optional<std::size_t> find_root_cause(std::span<const RankEnd> ends) {
  const auto order = [](const RankEnd& end) {
    return std::tuple(end.is_consequence(), end.failed_at_ns(), end.rank);
  };
  std::optional<std::size_t> root;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!ends[i].failed()) continue;
    if (!root || order(ends[i]) < order(ends[*root])) root = i;
  }
  return root;
}

}  // namespace tessera::cli
