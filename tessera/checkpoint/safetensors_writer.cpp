#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "tessera/checkpoint/posix_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/link_target.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

// Small pieces are collected up to this; larger ones are written as they come.
constexpr std::size_t kBufferBytes = std::size_t{1} << 18;
constexpr int kMaxNames = 1000;

// Renaming replaces whatever has the target's name: a device or a folder must not go that way.
void check_target(const std::string& path) {
  struct stat status {};
  TESSERA_CHECK(::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode), IoError,
                printable(path, 400),
                ": exists and is not a regular file; name a file that may be replaced");
}

// A new file beside the target. Names of writers that were killed, or are at work now, are passed
// over.
PosixFile open_beside(const std::string& path) {
  check_target(path);
  for (int number = 0; number < kMaxNames; ++number) {
    auto file = PosixFile::make(detail::concat(path, ".partial-", ::getpid(), "-", number), path);
    if (file.has_value()) {
      return std::move(*file);
    }
  }
  throw IoError(detail::concat(printable(path, 400), ": cannot write: ", kMaxNames,
                               " unfinished files lie beside it; remove ", printable(path, 400),
                               ".partial-*"));
}

// A rename is on disk when its folder is.
void sync_folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  PosixFile(folder.empty() ? "." : folder, O_RDONLY | O_DIRECTORY, "open the folder").sync();
}

}  // namespace

struct SafetensorsWriter::Impl {
  Impl(const std::string& target, const std::vector<TensorEntry>& entries,
       const std::map<std::string, std::string>& metadata)
      : path(link_target(target)) {
    const std::string header = format_header(entries, metadata);
    for (const TensorEntry& entry : entries) {
      announced_bytes += entry.bytes();
    }
    file.emplace(open_beside(path));
    buffer.reserve(kBufferBytes);
    put(header.data(), header.size());
  }

  ~Impl() { discard(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void discard() noexcept {
    if (file.has_value()) {
      ::unlink(file->path().c_str());
      file.reset();
    }
  }

  void put(const void* data, std::size_t bytes) {
    if (buffer.size() + bytes > kBufferBytes) {
      flush();
    }
    if (bytes >= kBufferBytes) {
      attempt([&] { file->write(data, bytes); });
      return;
    }
    const auto* from = static_cast<const std::byte*>(data);
    buffer.insert(buffer.end(), from, from + bytes);
  }

  void flush() {
    attempt([this] { file->write(buffer.data(), buffer.size()); });
    buffer.clear();
  }

  // A failure leaves nothing behind, and says how much of the file is missing.
  template <typename Work>
  void attempt(Work work) {
    try {
      work();
    } catch (const IoError& e) {
      discard();
      throw IoError(detail::concat(e.what(), " (", appended_bytes, " of ", announced_bytes,
                                   " bytes of tensors had come)"));
    }
  }

  const std::string path;
  std::size_t announced_bytes = 0;
  std::size_t appended_bytes = 0;
  std::optional<PosixFile> file;  // none after finish() or a failure
  std::vector<std::byte> buffer;
};

SafetensorsWriter::SafetensorsWriter(const std::string& path,
                                     const std::vector<TensorEntry>& entries,
                                     const std::map<std::string, std::string>& metadata)
    : impl_(std::make_unique<Impl>(path, entries, metadata)) {}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::append(const void* data, std::size_t bytes) {
  TESSERA_INVARIANT(impl_->file.has_value(), impl_->path,
                    ": written to after its end or a failure");
  TESSERA_INVARIANT(bytes <= impl_->announced_bytes - impl_->appended_bytes, impl_->path, ": ",
                    impl_->appended_bytes, " + ", bytes, " bytes of ", impl_->announced_bytes);
  impl_->put(data, bytes);
  impl_->appended_bytes += bytes;
}

void SafetensorsWriter::finish() {
  TESSERA_INVARIANT(impl_->file.has_value(), impl_->path, ": finished after its end or a failure");
  TESSERA_INVARIANT(impl_->appended_bytes == impl_->announced_bytes, impl_->path, ": ",
                    impl_->appended_bytes, " bytes of ", impl_->announced_bytes);
  impl_->flush();
  impl_->attempt([this] {
    impl_->file->sync();
    impl_->file->close();
    if (::rename(impl_->file->path().c_str(), impl_->path.c_str()) != 0) {
      throw_io_error(impl_->path, "put the new file in its place", errno);
    }
  });
  impl_->file.reset();
  sync_folder_of(impl_->path);
}

}  // namespace tessera::checkpoint
