#include "tessera/checkpoint/fragment_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/posix_file.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

using tier::kBlockBytes;

// One is filled while the others are written.
constexpr std::size_t kNumBuffers = 4;

template <typename Call>
auto retried(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) {
    result = call();
  }
  return result;
}

using AlignedMemory = std::unique_ptr<std::byte, void (*)(void*)>;

AlignedMemory aligned_memory(std::size_t bytes) {
  AlignedMemory memory(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes)), std::free);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

std::unique_ptr<tier::IoFile> make_file(const std::string& path, tier::DirectIo direct) {
  TESSERA_CHECK(PosixFile::make(path, path).has_value(), IoError, printable(path, 400),
                ": exists already; a checkpoint replaces no file");
  return tier::open_io_file(path, O_RDWR, direct);
}

}  // namespace

struct FragmentWriter::Impl {
  struct Buffer {
    std::byte* data = nullptr;
    device::Pending written;
  };

  Impl(const std::string& path, std::vector<TensorEntry> all, const WriterOptions& options)
      : entries(std::move(all)),
        room(header_room(entries, kBlockBytes)),
        io(*options.io),
        buffer_bytes(std::max(options.staging_bytes / kNumBuffers / kBlockBytes, std::size_t{1}) *
                     kBlockBytes),
        memory(aligned_memory(kNumBuffers * buffer_bytes)),
        file(make_file(path, options.direct)),
        bytes(room),
        offset(room),
        written(entries.size()) {
    for (std::size_t i = 0; i < kNumBuffers; ++i) {
      buffers[i].data = memory.get() + i * buffer_bytes;
    }
    for (const TensorEntry& entry : entries) {
      bytes += entry.bytes();
    }
    reserve();
  }

  ~Impl() {
    for (const Buffer& buffer : buffers) {
      device::wait_ignoring_failure(buffer.written);
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Whole blocks: the last one is cut in the end.
  void reserve() const {
    const std::uint64_t blocks = tier::whole_blocks(bytes);
    const std::string doing = detail::concat("reserve ", blocks, " bytes");
    // Above the limit the call would not fail, but end the process.
    struct rlimit limit {};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        blocks > limit.rlim_cur) {
      throw IoError(detail::concat(printable(file->path(), 400), ": cannot ", doing,
                                   ": this process may not write files larger than ",
                                   limit.rlim_cur, " bytes; raise the limit: ulimit -f unlimited"));
    }
    // Not posix_fallocate(), which writes all of it where the file system cannot reserve.
    if (retried([&] { return ::fallocate(file->fd(), 0, 0, static_cast<off_t>(blocks)); }) != 0 &&
        errno != EOPNOTSUPP && errno != ENOSYS) {
      throw_io_error(file->path(), doing, errno);
    }
  }

  Buffer& current() { return buffers[next % kNumBuffers]; }

  void put(std::span<const std::byte> data) {
    while (!data.empty()) {
      if (filled == 0) {
        current().written.wait();  // a failure stays, and keeps the buffer from being used again
      }
      const std::size_t count = std::min(data.size(), buffer_bytes - filled);
      std::memcpy(current().data + filled, data.data(), count);
      data = data.subspan(count);
      filled += count;
      if (filled == buffer_bytes) {
        start_write();
      }
    }
  }

  // Zeros behind what has come, up to a block.
  void start_write() {
    const std::size_t blocks = tier::whole_blocks(filled);
    std::memset(current().data + filled, 0, blocks - filled);
    current().written = io.start_write(*file, offset, current().data, blocks, what);
    offset += filled;
    filled = 0;
    ++next;
  }

  void write_rest() {
    if (filled > 0) {
      start_write();
    }
    for (std::size_t i = 0; i < kNumBuffers; ++i, ++next) {
      current().written.wait();  // the oldest first
    }
  }

  void write_header() {
    offset = 0;
    what = "header";
    const std::string header = format_header(placed, room);
    put(std::as_bytes(std::span(header)));
    write_rest();
  }

  template <typename Call>
  void call(const char* doing, const Call& system_call) const {
    if (retried(system_call) != 0) {
      throw_io_error(file->path(), doing, errno);
    }
  }

  const std::vector<TensorEntry> entries;
  const std::uint64_t room;  // of the header
  tier::IoEngine& io;
  const std::size_t buffer_bytes;
  const AlignedMemory memory;
  const std::unique_ptr<tier::IoFile> file;
  std::uint64_t bytes = 0;  // of the file

  std::array<Buffer, kNumBuffers> buffers;
  std::size_t next = 0;      // counts those that were written
  std::size_t filled = 0;    // of the current one
  std::uint64_t offset = 0;  // of its first byte, in the file
  std::string what;          // for errors

  std::vector<WrittenTensor> written;  // by tensor; offset 0: has not begun
  std::vector<PlacedTensor> placed;    // those that have begun, in order
  std::size_t number = 0;              // the last one
  std::uint64_t missing = 0;           // bytes of the last one
  Xxh3 xxh3;                           // of those that have come
};

FragmentWriter::FragmentWriter(const std::string& path, std::vector<TensorEntry> tensors,
                               const WriterOptions& options)
    : impl_(std::make_unique<Impl>(path, std::move(tensors), options)) {}

FragmentWriter::~FragmentWriter() = default;

void FragmentWriter::begin(std::size_t tensor) {
  Impl& impl = *impl_;
  TESSERA_INVARIANT(
      tensor < impl.entries.size() && impl.written[tensor].offset == 0 && impl.missing == 0,
      impl.file->path(), ": tensor ", tensor, " of ", impl.entries.size(),
      " begins again, or while ", impl.missing, " bytes of another are missing");
  const TensorEntry& entry = impl.entries[tensor];
  WrittenTensor& written = impl.written[tensor];
  written.offset = impl.offset + impl.filled;
  impl.placed.push_back({entry, written.offset - impl.room});
  impl.missing = entry.bytes();
  impl.xxh3 = Xxh3();
  impl.number = tensor;
  impl.what = detail::concat("tensor ", in_quotes(entry.name));
  if (impl.missing == 0) {
    written.xxh3 = impl.xxh3.value();
  }
}

void FragmentWriter::append(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  TESSERA_INVARIANT(bytes.size() <= impl.missing, impl.file->path(), ": ", bytes.size(),
                    " bytes come of a tensor of which ", impl.missing, " are missing");
  impl.xxh3.add(bytes);
  impl.put(bytes);
  impl.missing -= bytes.size();
  if (impl.missing == 0 && !bytes.empty()) {
    impl.written[impl.number].xxh3 = impl.xxh3.value();
  }
}

void FragmentWriter::finish() {
  Impl& impl = *impl_;
  TESSERA_INVARIANT(impl.placed.size() == impl.entries.size() && impl.missing == 0,
                    impl.file->path(), ": ", impl.placed.size(), " of ", impl.entries.size(),
                    " tensors have come, and ", impl.missing, " bytes of the last are missing");
  impl.write_rest();
  impl.call("cut to its size",
            [&] { return ::ftruncate(impl.file->fd(), static_cast<off_t>(impl.bytes)); });
  impl.write_header();
  impl.call("bring to disk", [&] { return ::fdatasync(impl.file->fd()); });
}

const WrittenTensor& FragmentWriter::written(std::size_t tensor) const {
  return impl_->written[tensor];
}

std::uint64_t FragmentWriter::file_bytes() const { return impl_->bytes; }

}  // namespace tessera::checkpoint
