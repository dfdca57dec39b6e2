#include "tessera/checkpoint/fragment_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/posix_file.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"
#include "tessera/device/device.h"

namespace tessera::checkpoint {
namespace {

using tier::kBlockBytes;

// Of the staging: as large as what a disk is asked for at a time, so that each can be filled again
// as soon as it is written. Requests in flight share the disk and end at about the same time: with
// few large buffers it would wait while all are filled.
constexpr std::size_t kMostBufferBytes = std::size_t{1} << 20;
constexpr std::size_t kLeastBuffers = 4;

std::unique_ptr<tier::IoFile> make_file(const std::string& path, tier::DirectIo direct) {
  TESSERA_CHECK(PosixFile::make(path, path).has_value(), IoError, printable(path, 400),
                ": exists already; a checkpoint replaces no file");
  return tier::open_io_file(path, O_RDWR, direct);
}

}  // namespace

struct FragmentWriter::Impl {
  // Of the staging. Bytes of the file in runs of buffer_bytes are windows; a buffer serves one
  // window after the other, as many apart as there are buffers.
  struct Buffer {
    std::byte* data = nullptr;
    std::uint64_t window = 0;
    std::size_t filled = 0;   // bytes of it that have come
    bool is_started = false;  // all have, and are being written
    device::Pending written;
  };

  Impl(const std::string& path, std::vector<TensorEntry> all, const WriterOptions& options)
      : entries(std::move(all)),
        room(header_room(entries, kBlockBytes)),
        io(*options.io),
        num_buffers(std::max(options.staging_bytes / kMostBufferBytes, kLeastBuffers)),
        buffer_bytes(std::max(options.staging_bytes / num_buffers / kBlockBytes, std::size_t{1}) *
                     kBlockBytes),
        memory(tier::transfer_memory(num_buffers * buffer_bytes)),
        file(make_file(path, options.direct)),
        bytes(room),
        buffers(num_buffers),
        written(entries.size()),
        end(room) {
    for (const TensorEntry& entry : entries) {
      bytes += entry.bytes();
    }
    open_windows(room);
    reserve();
  }

  ~Impl() { wait_for_writes(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void wait_for_writes() {
    for (const Buffer& buffer : buffers) {
      device::wait_ignoring_failure(buffer.written);
    }
  }

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

  // From `offset` on; nothing is in flight.
  void open_windows(std::uint64_t offset) {
    first_window_offset = offset;
    for (std::size_t i = 0; i < num_buffers; ++i) {
      buffers[i] = {memory.data() + i * buffer_bytes, i, 0, false, {}};
    }
  }

  void fill(std::uint64_t offset, std::span<const std::byte> data) {
    while (!data.empty()) {
      const std::uint64_t window = (offset - first_window_offset) / buffer_bytes;
      const std::size_t begin = (offset - first_window_offset) % buffer_bytes;
      const std::size_t count = std::min(data.size(), buffer_bytes - begin);
      Buffer& buffer = open(window);
      std::memcpy(buffer.data + begin, data.data(), count);
      data = data.subspan(count);
      offset += count;
      const std::lock_guard<std::mutex> lock(mutex);
      buffer.filled += count;
      num_filled += count;
      if (buffer.filled == buffer_bytes) {
        start_write(buffer);
      }
    }
  }

  // Waits until the buffer's window before this one is on disk.
  Buffer& open(std::uint64_t window) {
    Buffer& buffer = buffers[window % num_buffers];
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      if (failure) {
        std::rethrow_exception(failure);
      }
      if (buffer.window == window) {
        return buffer;
      }
      if (buffer.window + num_buffers != window || !buffer.is_started) {
        changed.wait(lock);
        continue;
      }
      const device::Pending before = buffer.written;
      lock.unlock();
      std::exception_ptr error;
      try {
        before.wait();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) {  // stays, and keeps the buffer from being used again
        fail(error);
      } else if (buffer.window + num_buffers == window) {  // the first who waited
        buffer.window = window;
        buffer.filled = 0;
        buffer.is_started = false;
        changed.notify_all();
      }
    }
  }

  // The mutex is held. Zeros behind what has come, up to a block.
  void start_write(Buffer& buffer) {
    const std::size_t blocks = tier::whole_blocks(buffer.filled);
    std::memset(buffer.data + buffer.filled, 0, blocks - buffer.filled);
    const std::uint64_t offset = first_window_offset + buffer.window * buffer_bytes;
    buffer.written =
        io.start_write(*file, offset, buffer.data, blocks, what(offset + buffer.filled - 1));
    buffer.is_started = true;
    changed.notify_all();
  }

  // The mutex is held.
  void fail(std::exception_ptr error) {
    failure = failure ? failure : std::move(error);
    changed.notify_all();
  }

  // For errors: what has this byte.
  std::string what(std::uint64_t offset) const {
    if (offset < room) {
      return "header";
    }
    const auto after = std::upper_bound(
        placed.begin(), placed.end(), offset - room,
        [](std::uint64_t at, const PlacedTensor& tensor) { return at < tensor.begin; });
    return after == placed.begin()
               ? std::string()
               : detail::concat("tensor ", in_quotes(std::prev(after)->entry.name));
  }

  void write_rest() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (failure) {
        std::rethrow_exception(failure);
      }
      TESSERA_INVARIANT(num_filled >= end - room, file->path(), ": ", num_filled,
                        " bytes have come for places of ", end - room);
    }
    write_buffers();
  }

  // Also what is not full; until everything is written.
  void write_buffers() {
    std::unique_lock<std::mutex> lock(mutex);
    std::vector<Buffer*> oldest;
    for (Buffer& buffer : buffers) {
      oldest.push_back(&buffer);
      if (buffer.filled > 0 && !buffer.is_started) {
        start_write(buffer);
      }
    }
    std::ranges::sort(oldest, {}, [](const Buffer* buffer) { return buffer->window; });
    lock.unlock();
    for (const Buffer* const buffer : oldest) {
      buffer->written.wait();
    }
  }

  void write_header() {
    const std::string header = format_header(placed, room);
    open_windows(0);
    fill(0, std::as_bytes(std::span(header)));
    write_buffers();
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
  const std::size_t num_buffers;
  const std::size_t buffer_bytes;
  const device::Memory memory;
  const std::unique_ptr<tier::IoFile> file;
  std::uint64_t bytes = 0;  // of the file

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex; a buffer's memory is everybody's who has a place in its window.
  std::vector<Buffer> buffers;
  std::uint64_t num_filled = 0;  // bytes
  std::exception_ptr failure;
  std::vector<PlacedTensor> placed;  // those that have begun, in order

  std::uint64_t first_window_offset = 0;
  std::vector<WrittenTensor> written;  // by tensor; offset 0: has not begun
  std::uint64_t end = 0;               // of the places that were given
  std::size_t number = 0;              // the last tensor that has begun
  std::uint64_t missing = 0;           // bytes of it that have no place yet
  Xxh3 xxh3;                           // of those that were appended
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
  written.offset = impl.end;
  {
    const std::lock_guard<std::mutex> lock(impl.mutex);
    impl.placed.push_back({entry, written.offset - impl.room});
  }
  impl.missing = entry.bytes();
  impl.xxh3 = Xxh3();
  impl.number = tensor;
  if (impl.missing == 0) {
    written.xxh3 = impl.xxh3.value();
  }
}

FilePlace FragmentWriter::place(std::uint64_t bytes) {
  Impl& impl = *impl_;
  {
    const std::lock_guard<std::mutex> lock(impl.mutex);
    if (impl.failure) {
      std::rethrow_exception(impl.failure);
    }
  }
  TESSERA_INVARIANT(bytes <= impl.missing, impl.file->path(), ": ", bytes,
                    " bytes come of a tensor of which ", impl.missing, " are missing");
  const FilePlace place = {impl.end, bytes};
  impl.end += bytes;
  impl.missing -= bytes;
  return place;
}

void FragmentWriter::fill(const FilePlace& place, std::uint64_t at,
                          std::span<const std::byte> bytes) {
  TESSERA_INVARIANT(at <= place.bytes && bytes.size() <= place.bytes - at, impl_->file->path(),
                    ": bytes [", at, ", +", bytes.size(), ") come for a place of ", place.bytes);
  impl_->fill(place.offset + at, bytes);
}

void FragmentWriter::fail(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->fail(std::move(error));
}

void FragmentWriter::append(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  const FilePlace at = place(bytes.size());
  impl.xxh3.add(bytes);
  impl.fill(at.offset, bytes);
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
