#include "tessera/checkpoint/posix_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera::checkpoint {
namespace {

// What one call may move: the kernel itself stops a little below 2 GiB.
constexpr std::size_t kMaxCallBytes = std::size_t{1} << 30;

std::string_view remedy(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return "; check the name, and that its folder exists";
    case EACCES:
    case EPERM:
      return "; check the permissions of the file and its folder";
    case EROFS:
      return "; choose a folder on a disk that can be written to";
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "; free some space, or choose a folder on another disk";
    case EISDIR:
      return "; name a file";
    default:
      return "";
  }
}

int open_file(const std::string& path, int flags) {
  return retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
}

}  // namespace

void throw_io_error(const std::string& path, std::string_view doing, int error) {
  throw IoError(detail::concat(printable(path, 400), ": cannot ", doing, ": ",
                               std::generic_category().message(error), remedy(error)));
}

PosixFile::PosixFile(std::string path, std::string shown_path, int descriptor)
    : path_(std::move(path)), shown_path_(std::move(shown_path)), descriptor_(descriptor) {}

PosixFile::PosixFile(const std::string& path, int flags, std::string_view doing)
    : PosixFile(path, path, open_file(path, flags)) {
  if (descriptor_ < 0) {
    throw_io_error(shown_path_, doing, errno);
  }
}

std::optional<PosixFile> PosixFile::make(std::string path, std::string shown_path) {
  const int descriptor = open_file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (descriptor < 0 && errno == EEXIST) {
    return std::nullopt;
  }
  if (descriptor < 0) {
    throw_io_error(shown_path, "write", errno);
  }
  return PosixFile(std::move(path), std::move(shown_path), descriptor);
}

PosixFile::~PosixFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

PosixFile::PosixFile(PosixFile&& other) noexcept
    : path_(std::move(other.path_)),
      shown_path_(std::move(other.shown_path_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

void PosixFile::write(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done =
        retried([&] { return ::write(descriptor_, from, std::min(bytes, kMaxCallBytes)); });
    if (done < 0) {
      throw_io_error(shown_path_, detail::concat("write the next ", bytes, " bytes"), errno);
    }
    from += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

std::size_t PosixFile::read_at(std::uint64_t offset, void* data, std::size_t bytes) const {
  auto* to = static_cast<char*>(data);
  std::size_t total = 0;
  while (total < bytes) {
    const ssize_t done = retried([&] {
      return ::pread(descriptor_, to + total, std::min(bytes - total, kMaxCallBytes),
                     static_cast<off_t>(offset + total));
    });
    if (done < 0) {
      throw_io_error(shown_path_, "read", errno);
    }
    if (done == 0) {
      break;
    }
    total += static_cast<std::size_t>(done);
  }
  return total;
}

void PosixFile::sync() {
  const int result = retried([this] { return ::fsync(descriptor_); });
  if (result != 0 && errno != EINVAL) {  // EINVAL: nothing there that could be synced, a pipe say
    throw_io_error(shown_path_, "bring to disk", errno);
  }
}

void PosixFile::close() {
  const int result = ::close(std::exchange(descriptor_, -1));
  // After EINTR the descriptor is gone all the same (Linux), and its data was synced before.
  if (result != 0 && errno != EINTR) {
    throw_io_error(shown_path_, "close", errno);
  }
}

}  // namespace tessera::checkpoint
