// A rank's last words to its launcher: why it failed, or that it was stopped.
//
// They travel in a memory file that the launcher makes for each rank and the rank inherits
// (TESSERA_REPORT_FD). Unlike a pipe it cannot fill up, so a dying rank never blocks on it, and the
// launcher reads it once, when the rank is gone.
//
// Threads: no shared state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

enum class FailureKind : std::uint8_t {
  kCause,     // this rank itself failed
  kPeerLoss,  // PeerError: this rank failed because another one did
  kStopped,   // told to stop, and has done all that it does then
};

struct RankReport {
  FailureKind kind = FailureKind::kCause;
  std::int64_t at_ns = 0;  // steady clock, which all processes of one host share
  std::string text;
};

// What a rank's environment holds besides the rendezvous.
inline constexpr const char* kReportFdVariable = "TESSERA_REPORT_FD";
inline constexpr const char* kLauncherPidVariable = "TESSERA_LAUNCHER_PID";

// A new, empty file, closed on exec. Throws CommError.
int make_report_file();
// False if it could not be written: then the exit code alone must do. Never throws.
bool write_report(int fd, const RankReport& report) noexcept;
// Nothing if the rank wrote none, or died while it wrote.
std::optional<RankReport> read_report(int fd);

}  // namespace tessera::comm
