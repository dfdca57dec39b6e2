#include "tessera/tier/scratch_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"
#include "tessera/core/units.h"

namespace tessera::tier {
namespace {

constexpr std::string_view kPrefix = "tessera-";
constexpr std::string_view kRank = "-rank";
constexpr std::string_view kSuffix = ".scratch";
constexpr std::size_t kMaxName = 200;  // file systems take 255
constexpr mode_t kScratchMode = 0600;

// The head of the file, in the machine's own byte order: no other machine reads it.
struct Header {
  std::array<char, 16> magic = {'T', 'E', 'S', 'S', 'E', 'R', 'A', '-',
                                'S', 'C', 'R', 'A', 'T', 'C', 'H', '\n'};
  std::uint32_t version = 1;
  std::uint32_t name_bytes = 0;
  std::array<char, kMaxName> name{};
};
static_assert(sizeof(Header) <= ScratchFile::kDataOffset);

std::string shown(const std::string& path) { return printable(path, 400); }

std::string reason(int error) {
  return detail::concat(std::generic_category().message(error), " (", error, ")");
}

// A descriptor that is closed again.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  const int fd_;
};

bool is_run_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == '-';
}
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

template <typename Predicate>
bool is_word(std::string_view text, const Predicate& predicate) {
  return !text.empty() && std::all_of(text.begin(), text.end(), predicate);
}

std::string file_name(const ScratchName& name) {
  TESSERA_CHECK(is_word(name.run, is_run_char), ConfigError, "run id ", in_quotes(name.run),
                " cannot be part of a file's name; use letters, digits, '_', '.' and '-'");
  TESSERA_INVARIANT(is_word(name.role, is_lower) && name.rank >= 0, "scratch file of rank ",
                    name.rank, " for ", in_quotes(name.role));
  std::string text = detail::concat(kPrefix, name.run, kRank, name.rank, '-', name.role, kSuffix);
  TESSERA_CHECK(text.size() <= kMaxName, ConfigError, "run id ", in_quotes(name.run), " has ",
                name.run.size(), " characters; scratch files named by it would have more than ",
                kMaxName, "; use a shorter one");
  return text;
}

// Exactly what file_name() makes.
bool has_our_form(std::string_view name) {
  if (name.size() > kMaxName || !name.starts_with(kPrefix) || !name.ends_with(kSuffix) ||
      name.size() < kPrefix.size() + kSuffix.size()) {
    return false;
  }
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  const std::size_t dash = name.rfind('-');
  if (dash == std::string_view::npos || !is_word(name.substr(dash + 1), is_lower)) {
    return false;
  }
  name = name.substr(0, dash);
  const std::size_t rank = name.rfind(kRank);
  if (rank == std::string_view::npos || !is_word(name.substr(0, rank), is_run_char)) {
    return false;
  }
  const std::string_view digits = name.substr(rank + kRank.size());
  return is_word(digits, is_digit) && (digits == "0" || digits.front() != '0');
}

bool has_our_header(int fd, std::string_view name) {
  Header header;
  const ssize_t done = retried([&] { return ::pread(fd, &header, sizeof(header), 0); });
  return done == static_cast<ssize_t>(sizeof(header)) && header.magic == Header().magic &&
         header.name_bytes == name.size() &&
         std::string_view(header.name.data(), name.size()) == name;
}

// Whether `name` in the directory is still the file that was opened. Async-signal-safe.
bool is_same_file(int directory, const char* name, int fd) {
  struct stat by_name {};
  struct stat by_fd {};
  return ::fstatat(directory, name, &by_name, AT_SYMLINK_NOFOLLOW) == 0 &&
         ::fstat(fd, &by_fd) == 0 && S_ISREG(by_fd.st_mode) && by_name.st_dev == by_fd.st_dev &&
         by_name.st_ino == by_fd.st_ino;
}

bool remove_if_stale(int directory, const std::string& name) {
  // Neither links nor what would block: a pipe, say. For writing, though nothing is written: an
  // exclusive lock on a network file system asks for it.
  const Descriptor file(retried([&] {
    return ::openat(directory, name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  }));
  // The header before the lock: whoever has just created a file and not yet locked it must not
  // find it locked by us.
  return file.is_open() && has_our_header(file.get(), name) &&
         retried([&] { return ::flock(file.get(), LOCK_EX | LOCK_NB); }) == 0 &&
         is_same_file(directory, name.c_str(), file.get()) &&
         ::unlinkat(directory, name.c_str(), 0) == 0;
}

std::uint64_t free_bytes(int fd) {
  struct statvfs info {};
  // A file system that cannot say is asked for the blocks themselves.
  return ::fstatvfs(fd, &info) == 0 ? static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize
                                    : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace

void check_scratch_directory(const std::string& path) {
  constexpr std::string_view kRemedy = "; name a directory on a local disk for scratch files";
  struct stat info {};
  TESSERA_CHECK(::stat(path.c_str(), &info) == 0, ConfigError, "scratch directory ", shown(path),
                ": ", reason(errno), kRemedy, ", and create it first");
  TESSERA_CHECK(S_ISDIR(info.st_mode), ConfigError, "scratch directory ", shown(path),
                " is not a directory", kRemedy);
  TESSERA_CHECK(::access(path.c_str(), R_OK | W_OK | X_OK) == 0, ConfigError, "scratch directory ",
                shown(path), " cannot be written to: ", reason(errno), kRemedy);
  struct statfs system {};
  TESSERA_CHECK(::statfs(path.c_str(), &system) == 0, ConfigError, "scratch directory ",
                shown(path), ": ", reason(errno), kRemedy);
  // linux/magic.h
  constexpr std::array<std::uint64_t, 2> kMemory = {0x01021994 /* tmpfs */, 0x858458f6 /* ramfs */};
  const auto type = static_cast<std::uint32_t>(system.f_type);
  TESSERA_CHECK(std::find(kMemory.begin(), kMemory.end(), type) == kMemory.end(), ConfigError,
                "scratch directory ", shown(path),
                " is memory, not a disk (tmpfs or ramfs): what is put there stays in memory",
                kRemedy);
}

std::vector<std::string> remove_stale(const std::string& directory) {
  const Descriptor folder(
      retried([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  TESSERA_CHECK(folder.is_open(), IoError, "cannot look for stale scratch files in ",
                shown(directory), ": ", reason(errno), "; create it, or name another");
  std::vector<std::string> removed;
  std::error_code error;
  // Removing an entry while the directory is read is allowed; others may come and go as well.
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (has_our_form(name) && remove_if_stale(folder.get(), name)) {
      removed.push_back(std::move(name));
    }
  }
  TESSERA_CHECK(!error, IoError, "cannot look for stale scratch files in ", shown(directory), ": ",
                reason(error.value()));
  std::sort(removed.begin(), removed.end());
  return removed;
}

namespace {

// The files that this process has open, for unlink_scratch_files(): a signal handler can reach
// nothing else. A file that finds no slot is left to remove_stale() if the process is killed.
struct OpenSlot {
  enum State : int { kFree, kChanging, kOpen };

  std::atomic<int> state{kFree};
  int directory = -1;
  int file = -1;
  std::array<char, kMaxName + 1> name{};
};
static_assert(std::atomic<int>::is_always_lock_free);
std::array<OpenSlot, 256> open_slots;

OpenSlot* take_slot(int directory, int file, const std::string& name) {
  for (OpenSlot& slot : open_slots) {
    int free = OpenSlot::kFree;
    if (slot.state.compare_exchange_strong(free, OpenSlot::kChanging)) {
      slot.directory = directory;
      slot.file = file;
      slot.name[name.copy(slot.name.data(), kMaxName)] = '\0';
      slot.state = OpenSlot::kOpen;
      return &slot;
    }
  }
  return nullptr;
}

}  // namespace

void unlink_scratch_files() noexcept {
  for (OpenSlot& slot : open_slots) {
    int open = OpenSlot::kOpen;
    // Stays kChanging: the process ends, and nobody else shall touch it.
    if (slot.state.compare_exchange_strong(open, OpenSlot::kChanging) &&
        is_same_file(slot.directory, slot.name.data(), slot.file)) {
      ::unlinkat(slot.directory, slot.name.data(), 0);
    }
  }
}

class ScratchFile::Owned {
 public:
  Owned(const std::string& directory, std::string name)
      : directory_(
            retried([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); })),
        name_(std::move(name)),
        file_(create(directory)),
        slot_(take_slot(directory_.get(), file_.get(), name_)) {}

  // Lets go of the name, then of the lock: there is no moment at which it looks stale.
  ~Owned() {
    if (is(file_.get())) {
      ::unlinkat(directory_.get(), name_.c_str(), 0);
    }
    if (slot_ != nullptr) {
      int open = OpenSlot::kOpen;
      slot_->state.compare_exchange_strong(open, OpenSlot::kFree);
    }
  }

  int fd() const { return file_.get(); }
  // Whether `fd` is what the name stands for now.
  bool is(int fd) const { return is_same_file(directory_.get(), name_.c_str(), fd); }

  void lock_and_write_header(const std::string& path) const {
    TESSERA_CHECK(retried([&] { return ::flock(fd(), LOCK_EX | LOCK_NB); }) == 0, IoError,
                  "cannot lock ", shown(path), ": ", reason(errno),
                  "; name a directory on a file system with locks");
    Header header;
    header.name_bytes = static_cast<std::uint32_t>(name_.size());
    std::copy(name_.begin(), name_.end(), header.name.begin());
    std::array<char, kDataOffset> block{};
    std::memcpy(block.data(), &header, sizeof(header));
    const ssize_t done = retried([&] { return ::pwrite(fd(), block.data(), block.size(), 0); });
    TESSERA_CHECK(done == static_cast<ssize_t>(block.size()), IoError, "cannot write ",
                  block.size(), " bytes at offset 0 of ", shown(path), ": ",
                  done < 0 ? reason(errno) : detail::concat(done, " were written"),
                  "; make room on that disk, or name a directory on another");
  }

 private:
  int create(const std::string& directory) const {
    TESSERA_CHECK(directory_.is_open(), IoError, "cannot open directory ", shown(directory), ": ",
                  reason(errno), "; create it, or name another");
    const int fd = retried([&] {
      return ::openat(directory_.get(), name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
                      kScratchMode);
    });
    TESSERA_CHECK(fd >= 0, IoError, "cannot create ", name_, " in ", shown(directory), ": ",
                  reason(errno),
                  errno == EEXIST ? "; another run uses this id, or the directory is named twice"
                                  : "; name a directory that this user can write to");
    return fd;
  }

  // By its descriptor: the working directory and the path's own parts may change meanwhile.
  const Descriptor directory_;
  const std::string name_;
  const Descriptor file_;
  OpenSlot* const slot_;  // null: all were taken
};

ScratchFile::ScratchFile(const std::string& directory, const ScratchName& name, DirectIo mode)
    : path_((std::filesystem::absolute(directory) / file_name(name)).string()),
      owned_(std::make_unique<Owned>(directory, file_name(name))) {
  owned_->lock_and_write_header(path_);
  io_file_ = open_io_file(path_, O_RDWR | O_NOFOLLOW, mode);
  TESSERA_CHECK(owned_->is(io_file_->fd()), IoError, shown(path_),
                " was replaced while it was opened; name a directory that nobody else changes");
}

ScratchFile::~ScratchFile() = default;

void ScratchFile::extend(std::uint64_t bytes) {
  if (bytes <= bytes_) {
    return;
  }
  const std::uint64_t more = bytes - bytes_;
  const auto refuse = [&](const std::string& why) {
    throw IoError(detail::concat("cannot reserve ", more, " bytes (", approximate_bytes(more),
                                 ") more for ", shown(path_), ", which has ", bytes_, ": ", why));
  };
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      kDataOffset + bytes > limit.rlim_cur) {
    refuse(detail::concat("this process may not write files larger than ", limit.rlim_cur,
                          " bytes; raise the limit: ulimit -f unlimited"));
  }
  const auto free = [&] {
    const std::uint64_t now = free_bytes(owned_->fd());
    return detail::concat(now, " bytes (", approximate_bytes(now),
                          ") are free there; make room, name a directory on another disk, or raise "
                          "the memory budget so that less goes to NVMe");
  };
  if (more > free_bytes(owned_->fd())) {
    refuse(free());
  }
  int error = EINTR;
  while (error == EINTR) {
    error = ::posix_fallocate(owned_->fd(), static_cast<off_t>(kDataOffset + bytes_),
                              static_cast<off_t>(more));
  }
  if (error != 0) {
    // Best effort: what was taken before the disk was full.
    static_cast<void>(::ftruncate(owned_->fd(), static_cast<off_t>(kDataOffset + bytes_)) == 0);
    refuse(detail::concat(reason(error), "; ", free()));
  }
  bytes_ = bytes;
}

}  // namespace tessera::tier
