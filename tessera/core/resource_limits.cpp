#include "tessera/core/resource_limits.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

rlimit limit_of(decltype(RLIMIT_NOFILE) resource) {
  struct rlimit limit {};
  if (::getrlimit(resource, &limit) != 0) {
    limit.rlim_cur = RLIM_INFINITY;
    limit.rlim_max = RLIM_INFINITY;
  }
  return limit;
}

// 0: unknown.
std::uint64_t address_space_bytes() {
  std::uint64_t pages = 0;
  return std::ifstream("/proc/self/statm") >> pages
             ? pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))
             : 0;
}

}  // namespace

std::uint64_t open_file_limit() { return limit_of(RLIMIT_NOFILE).rlim_cur; }

std::uint64_t num_open_files() {
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) {
    return 0;
  }
  std::uint64_t count = 0;
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count - std::min<std::uint64_t>(count, 3);  // ".", ".." and the folder itself
}

void raise_open_file_limit(std::uint64_t wanted) {
  struct rlimit limit = limit_of(RLIMIT_NOFILE);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max);
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

std::string open_files_remedy() {
  constexpr std::uint64_t kUsual = 1024;
  const std::uint64_t limit = open_file_limit();
  return detail::concat("; this process may have ", limit,
                        " files and connections open at a time: raise the limit, ulimit -n ",
                        std::max(kUsual, 2 * limit));
}

std::string remedy_of(const std::string& reason) {
  return reason.find(std::strerror(EMFILE)) == std::string::npos ? std::string()
                                                                 : open_files_remedy();
}

std::optional<std::uint64_t> address_space_limit() {
  const rlimit limit = limit_of(RLIMIT_AS);
  return limit.rlim_cur == RLIM_INFINITY ? std::nullopt
                                         : std::optional<std::uint64_t>(limit.rlim_cur);
}

std::string no_memory_text(std::uint64_t asked_bytes) {
  std::string text = "out of memory on the host";
  if (asked_bytes > 0) {
    text += detail::concat(": ", asked_bytes, " bytes (", approximate_bytes(asked_bytes),
                           ") were asked for");
  }
  const std::optional<std::uint64_t> limit = address_space_limit();
  if (!limit) {
    return text + "; use more ranks, a smaller batch, or --nvme, or free memory of the machine";
  }
  const std::uint64_t used = address_space_bytes();
  text += detail::concat("; the address space of this process is limited to ", *limit / 1024,
                         " KiB (ulimit -v)");
  if (used > 0) {
    text += detail::concat(", of which ", used / 1024, " are used");
  }
  return text + ": raise it, ulimit -v unlimited";
}

}  // namespace tessera
