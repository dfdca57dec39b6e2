#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "cli/probe.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kPageBytes = 4096;

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using Page = std::unique_ptr<unsigned char, FreeDeleter>;

Page aligned_page() {
  return Page(static_cast<unsigned char*>(std::aligned_alloc(kPageBytes, kPageBytes)));
}

std::filesystem::path probe_file(const std::filesystem::path& directory) {
  return directory / (".tessera-doctor-" + std::to_string(::getpid()));
}

// ext2, ext3 and ext4 share one number; so do all FUSE file systems.
std::string file_system_name(const std::filesystem::path& directory) {
  struct statfs info {};
  if (::statfs(directory.c_str(), &info) != 0) {
    return "unknown file system";
  }
  constexpr long kXfs = 0x58465342;
  constexpr long kZfs = 0x2fc12fc1;
  constexpr long kFuse = 0x65735546;
  constexpr long kLustre = 0x0bd00bd0;
  switch (static_cast<long>(info.f_type)) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case kXfs:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case TMPFS_MAGIC:
      return "tmpfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlayfs";
    case NFS_SUPER_MAGIC:
      return "nfs";
    case kZfs:
      return "zfs";
    case kFuse:
      return "fuse";
    case kLustre:
      return "lustre";
    default:
      break;
  }
  std::ostringstream number;
  number << "file system 0x" << std::hex << info.f_type;
  return number.str();
}

// Writes one page past the cache and reads it back. Empty: it came back as it went.
std::string exchange_page(int fd) {
  const Page written = aligned_page();
  const Page read_back = aligned_page();
  if (!written || !read_back) {
    return "no memory for two pages";
  }
  for (std::size_t i = 0; i < kPageBytes; ++i) {
    written.get()[i] = static_cast<unsigned char>(i * 31 + 7);
  }
  std::memset(read_back.get(), 0, kPageBytes);
  if (::pwrite(fd, written.get(), kPageBytes, 0) != static_cast<ssize_t>(kPageBytes)) {
    return std::string("write: ") + std::strerror(errno);
  }
  if (::pread(fd, read_back.get(), kPageBytes, 0) != static_cast<ssize_t>(kPageBytes)) {
    return std::string("read: ") + std::strerror(errno);
  }
  return std::memcmp(written.get(), read_back.get(), kPageBytes) == 0
             ? std::string()
             : std::string("the page came back changed");
}

}  // namespace

int setup_io_uring() {
  io_uring_params params{};
  const long fd = ::syscall(SYS_io_uring_setup, 4U, &params);
  return fd < 0 ? -errno : static_cast<int>(fd);
}

ProbeResult probe_io_uring(const UringSetup& setup, const std::filesystem::path& root) {
  ProbeResult result{"io_uring", ProbeState::kOk, "a ring was set up", "", false};
  const int fd = setup();
  if (fd >= 0) {
    ::close(fd);
    return result;
  }
  result.state = ProbeState::kMissing;
  std::string remedy;
  int disabled = 0;
  std::ifstream(root / "proc/sys/kernel/io_uring_disabled") >> disabled;
  if (fd == -ENOSYS) {
    result.found = "the kernel has none (ENOSYS)";
    remedy = "Linux 5.6 or later has it";
  } else if (disabled != 0) {
    result.found = "switched off: kernel.io_uring_disabled=" + std::to_string(disabled);
    remedy = "an administrator can run: sysctl kernel.io_uring_disabled=0";
  } else if (fd == -EPERM || fd == -EACCES) {
    result.found = "refused (EPERM), most likely by the container's seccomp profile";
    remedy = "allow the io_uring calls in that profile";
  } else if (fd == -ENOMEM) {
    result.found = "no locked memory left for a ring (ENOMEM)";
    remedy = "raise the limit: ulimit -l";
  } else {
    result.found = std::string("io_uring_setup: ") + std::strerror(-fd);
    remedy = "see the kernel's log";
  }
  result.cost = "NVMe is read and written by a pool of threads, at more CPU per byte; " + remedy;
  return result;
}

int open_direct(const std::filesystem::path& file) {
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
  return fd < 0 ? -errno : fd;
}

ProbeResult probe_direct_io(const std::filesystem::path& directory, const DirectOpen& open) {
  ProbeResult result{"O_DIRECT", ProbeState::kOk, "a page went past the cache and back", "", false};
  const std::string file_system = file_system_name(directory);
  const std::filesystem::path file = probe_file(directory);
  const FileDescriptor fd(open(file));
  std::string failure;
  if (fd.get() < 0) {
    failure = std::string("open: ") + std::strerror(-fd.get());
  } else {
    failure = exchange_page(fd.get());
  }
  // Some file systems make the file before they refuse the flag.
  ::unlink(file.c_str());
  if (!failure.empty()) {
    result.state = ProbeState::kMissing;
    result.found = "refused on " + file_system + " (" + failure + ")";
    result.cost =
        "offloaded data passes through the page cache: slower, and it takes memory twice; "
        "use a directory on a local ext4 or xfs disk";
  } else if (file_system == "tmpfs") {
    result.state = ProbeState::kLimited;
    result.found = "accepted, but tmpfs is memory and not a disk";
    result.cost = "offloading there frees no memory; give a directory on a disk with --dir";
  }
  return result;
}

ProbeResult probe_directory(const std::filesystem::path& directory) {
  ProbeResult result{"directory", ProbeState::kOk, "", "", false};
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0) {
    result.state = ProbeState::kMissing;
    result.found = directory.string() + ": " + std::strerror(errno);
    result.cost = "nothing can be offloaded there; create it, or give another with --dir";
    return result;
  }
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
  std::error_code ignored;
  const std::filesystem::path shown = std::filesystem::canonical(directory, ignored);
  result.found = (shown.empty() ? directory : shown).string() + ", " + file_system_name(directory) +
                 ", " + approximate_bytes(free_bytes) + " free";
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    result.state = ProbeState::kMissing;
    result.found += ", not writable";
    result.cost = "nothing can be offloaded there; give another directory with --dir";
  } else if (free_bytes < (std::uint64_t{1} << 30)) {
    result.state = ProbeState::kLimited;
    result.cost =
        "too little for offloading: a parameter takes 12 to 16 bytes with AdamW; "
        "make space, or give another directory with --dir";
  }
  return result;
}

}  // namespace tessera::cli
