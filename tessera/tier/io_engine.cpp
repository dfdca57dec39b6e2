#include "tessera/tier/io_engine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"
#include "tessera/device/host_memory.h"
#include "tessera/tier/range_queue.h"
#include "tessera/tier/thread_engine.h"
#include "tessera/tier/uring_engine.h"

namespace tessera::tier {
namespace {

constexpr mode_t kOwnerOnly = 0600;

constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 30;  // the kernel stops below 2 GiB

std::string_view open_remedy(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return "; create its directory, or name another";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; name a directory that this user can write to";
    case ENOSPC:
    case EDQUOT:
      return "; make room on that disk, or name a directory on another";
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files: ulimit -n";
    default:
      return "";
  }
}

// Whether direct transfers of kBlockBytes are possible; kernels before 6.1 cannot say, and then
// those that take the flag are taken at their word.
bool blocks_suffice(int fd) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0) {
    return info.stx_dio_offset_align != 0 && info.stx_dio_offset_align <= kBlockBytes &&
           info.stx_dio_mem_align <= kBlockBytes;
  }
#else
  static_cast<void>(fd);
#endif
  return true;
}

// Set afterwards instead of in open(): some file systems make the file before they refuse the flag.
bool set_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && blocks_suffice(fd) && ::fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
}

}  // namespace

device::Memory transfer_memory(std::size_t bytes) {
  device::HostMemoryRequest request;
  request.bytes = bytes;
  request.alignment = kBlockBytes;
  request.role = Role::kStaging;
  return device::allocate_host_memory(request);
}

IoFile::IoFile(std::string path, int fd, bool is_direct)
    : path_(std::move(path)), fd_(fd), is_direct_(is_direct) {}

IoFile::~IoFile() { ::close(fd_); }

std::unique_ptr<IoFile> open_io_file(const std::string& path, int flags, DirectIo mode) {
  TESSERA_INVARIANT((flags & O_DIRECT) == 0, "O_DIRECT for ", path, " is chosen by the mode");
  const int fd = retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, kOwnerOnly); });
  TESSERA_CHECK(fd >= 0, IoError, "cannot open ", printable(path, 400), ": ", system_reason(errno),
                open_remedy(errno));
  const bool is_direct = mode != DirectIo::kOff && set_direct(fd);
  auto file = std::make_unique<IoFile>(path, fd, is_direct);
  TESSERA_CHECK(is_direct || mode != DirectIo::kOn, ConfigError, "the file system of ",
                printable(path, 400), " refuses direct I/O (O_DIRECT) in blocks of ", kBlockBytes,
                " bytes; name a directory on a local ext4 or xfs disk, or allow buffered I/O");
  return file;
}

std::unique_ptr<IoEngine> make_io_engine(const IoOptions& options,
                                         const std::function<void(const std::string&)>& notice) {
  TESSERA_CHECK(options.block_bytes % kBlockBytes == 0 && options.block_bytes > 0 &&
                    options.block_bytes <= kMaxRequestBytes,
                ConfigError, "I/O in requests of ", options.block_bytes,
                " bytes; give a multiple of ", kBlockBytes, " up to ", kMaxRequestBytes);
  TESSERA_CHECK(options.queue_depth > 0 && options.num_threads > 0, ConfigError, "I/O with ",
                options.num_threads, " threads and a queue depth of ", options.queue_depth,
                "; both must be at least 1");
  if (options.kind == IoKind::kThreads) {
    return make_thread_engine(options);
  }
  std::string reason;
  if (std::unique_ptr<IoEngine> engine = try_make_uring_engine(options, reason)) {
    return engine;
  }
  TESSERA_CHECK(options.kind == IoKind::kAuto, ConfigError, "io_uring was asked for, but ", reason,
                "; choose the engine auto or threads");
  if (notice) {
    notice("files are read and written by threads: " + reason);
  }
  return make_thread_engine(options);
}

}  // namespace tessera::tier
