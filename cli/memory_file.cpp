#include "cli/memory_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMaxTextBytes = std::size_t{16} << 20;

}  // namespace

MemoryFile::MemoryFile(std::string_view content)
    : fd_(::memfd_create("tessera-capture", MFD_CLOEXEC)) {
  TESSERA_CHECK(fd_ >= 0, IoError, "no memory file for a program that is started: ",
                std::generic_category().message(errno));
  std::size_t written = 0;
  while (written < content.size()) {
    const ssize_t bytes = ::pwrite(fd_, content.data() + written, content.size() - written,
                                   static_cast<off_t>(written));
    if (bytes <= 0) {
      const int error = errno;
      ::close(fd_);
      throw IoError("a memory file for a program that is started cannot be written: " +
                    std::generic_category().message(error));
    }
    written += static_cast<std::size_t>(bytes);
  }
}

MemoryFile::~MemoryFile() { ::close(fd_); }

std::string MemoryFile::text() const {
  std::string text;
  char buffer[4096];
  ssize_t bytes = 0;
  while (text.size() < kMaxTextBytes &&
         (bytes = ::pread(fd_, buffer, sizeof buffer, static_cast<off_t>(text.size()))) > 0) {
    text.append(buffer, static_cast<std::size_t>(bytes));
  }
  return text;
}

}  // namespace tessera::cli
