// How one rank's process ended, and which of several ends is the root cause.
//
// When one rank dies the others fail too, because they lose it. Only one message helps: that of the
// rank which failed on its own.
//
// Threads: pure functions on plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tessera/comm/rank_report.h"

namespace tessera::cli {

struct RankEnd {
  int rank = 0;
  int exit_code = 0;       // if `signal` is 0
  int signal = 0;          // that killed it
  std::int64_t at_ns = 0;  // when the launcher saw it
  std::optional<comm::RankReport> report;

  bool failed() const { return exit_code != 0 || signal != 0; }
  // Failed only because another rank did.
  bool is_consequence() const;
  // Ended by a signal, behind a step and with everything written: it says so itself.
  bool is_stop() const { return report && report->kind == comm::FailureKind::kStopped; }
  // As a shell would give it: 128 + signal.
  int shell_code() const { return signal != 0 ? 128 + signal : exit_code; }
  // The rank's own time where it told one: the launcher may see two ends at once.
  std::int64_t failed_at_ns() const { return report ? report->at_ns : at_ns; }
};

// "killed by signal 9 (SIGKILL); ...": without the rank, as it is posted in the status store.
std::string describe_cause(const RankEnd& end);
// "rank 2 was killed by signal 9 (SIGKILL); ...": the line that the launcher shows.
std::string describe_end(const RankEnd& end);
// "SIGINT"; "signal 64" for one without a name.
std::string signal_name(int signal);

// Index of the end that explains the others: causes before consequences, then the earliest.
// Nothing if no rank failed.
std::optional<std::size_t> find_root_cause(std::span<const RankEnd> ends);

}  // namespace tessera::cli
