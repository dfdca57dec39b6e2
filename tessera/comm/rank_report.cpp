#include "tessera/comm/rank_report.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/core/system_call.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxTextBytes = 64 * 1024;
constexpr std::uint32_t kComplete = 0x74657373;

// Fixed part, at offset 0. It is written after the text: what is complete is whole.
struct Header {
  std::uint32_t complete = 0;
  std::uint32_t kind = 0;
  std::int64_t at_ns = 0;
  std::uint64_t text_bytes = 0;
};

// All of it, however often the kernel takes a part: `call` is pread or pwrite.
template <typename Byte, typename Call>
bool transfer(Call call, int fd, Byte* next, std::size_t bytes, off_t offset) noexcept {
  while (bytes > 0) {
    const ssize_t done = retried([&] { return call(fd, next, bytes, offset); });
    if (done <= 0) return false;
    next += done;
    offset += done;
    bytes -= static_cast<std::size_t>(done);
  }
  return true;
}

bool write_at(int fd, const void* data, std::size_t bytes, off_t offset) noexcept {
  return transfer(pwrite, fd, static_cast<const char*>(data), bytes, offset);
}

bool read_at(int fd, void* data, std::size_t bytes, off_t offset) noexcept {
  return transfer(pread, fd, static_cast<char*>(data), bytes, offset);
}

}  // namespace

int make_report_file() {
  const int fd = memfd_create("tessera-rank-report", MFD_CLOEXEC);
  TESSERA_CHECK(fd >= 0, CommError,
                "launcher: no memory file for a rank's report: ", std::strerror(errno),
                "; if the limit of open files is reached, raise it: ulimit -n");
  return fd;
}

bool write_report(int fd, const RankReport& report) noexcept {
  Header header;
  header.complete = kComplete;
  header.kind = static_cast<std::uint32_t>(report.kind);
  header.at_ns = report.at_ns;
  header.text_bytes = std::min(report.text.size(), kMaxTextBytes);
  return write_at(fd, report.text.data(), header.text_bytes, sizeof(Header)) &&
         write_at(fd, &header, sizeof(Header), 0);
}

std::optional<RankReport> read_report(int fd) {
  Header header;
  if (!read_at(fd, &header, sizeof(Header), 0) || header.complete != kComplete ||
      header.text_bytes > kMaxTextBytes) {
    return std::nullopt;
  }
  RankReport report;
  report.kind = FailureKind::kCause;
  for (const FailureKind kind : {FailureKind::kPeerLoss, FailureKind::kStopped}) {
    if (header.kind == static_cast<std::uint32_t>(kind)) report.kind = kind;
  }
  report.at_ns = header.at_ns;
  report.text.resize(header.text_bytes);
  if (!read_at(fd, report.text.data(), report.text.size(), sizeof(Header))) return std::nullopt;
  return report;
}

}  // namespace tessera::comm
