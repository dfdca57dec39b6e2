#include "cli/record_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

// While it lives, a reader of a pipe that is gone is an error of write() and not a signal, which
// would end the run. What other threads do with the signal is theirs.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigemptyset(&pending);
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoPipeSignal() {
    const int error = errno;
    if (!was_pending_) {
      const timespec no_wait{};
      sigtimedwait(&pipe_, nullptr, &no_wait);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  sigset_t pipe_{};
  sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace

RecordFile::RecordFile(RecordFileOptions options)
    : options_(std::move(options)),
      fd_(::open(options_.path.c_str(),
                 O_WRONLY | O_CREAT | (options_.keep_bytes == 0 ? O_TRUNC : 0) | O_CLOEXEC, 0666)) {
  TESSERA_CHECK(fd_ >= 0, IoError, options_.flag, " ", tessera::in_quotes(options_.path),
                " cannot be opened: ", std::strerror(errno));
  if (options_.keep_bytes > 0 && (::ftruncate(fd_, options_.keep_bytes) != 0 ||
                                  ::lseek(fd_, options_.keep_bytes, SEEK_SET) < 0)) {
    const int error = errno;
    ::close(fd_);
    throw IoError(detail::concat(options_.flag, " ", tessera::in_quotes(options_.path),
                                 " cannot be continued: ", std::strerror(error)));
  }
  end_ = options_.keep_bytes;
}

RecordFile::~RecordFile() { ::close(fd_); }

bool RecordFile::append(std::string_view record) {
  if (!usable_) {
    return false;
  }
  std::size_t written = 0;
  if (!write_all(record, written)) {
    give_up_record(written, errno);
    return false;
  }
  end_ += static_cast<std::int64_t>(record.size());
  return true;
}

bool RecordFile::write_all(std::string_view bytes, std::size_t& written) const {
  const NoPipeSignal guard;
  while (written < bytes.size()) {
    const ssize_t count =
        retried([&] { return ::write(fd_, bytes.data() + written, bytes.size() - written); });
    if (count <= 0) {
      errno = count == 0 ? ENOSPC : errno;
      return false;
    }
    written += static_cast<std::size_t>(count);
  }
  return true;
}

void RecordFile::give_up_record(std::size_t written, int error) {
  if (written > 0) {
    usable_ = ::ftruncate(fd_, end_) == 0 && ::lseek(fd_, end_, SEEK_SET) == end_;
  }
  if (!std::exchange(warned_, true) && options_.warn) {
    options_.warn(
        detail::concat(options_.flag, " ", tessera::in_quotes(options_.path),
                       " cannot be written: ", std::strerror(error), "; training goes on, and ",
                       usable_ ? "steps are missing in the file until it can be written again"
                               : "nothing more is written to the file"));
  }
}

}  // namespace tessera::cli
