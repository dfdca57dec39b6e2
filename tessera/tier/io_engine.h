// The interface to the disk: read and write at an offset. Threads and io_uring are behind it, and
// no other module knows which.
//
// A range of any size is cut into requests of `block_bytes`, of which at most queue_depth * threads
// are in flight; reads are begun in the order in which they were given, writes in theirs, and both
// take turns.
//
// Every completion is checked: a Pending is done only when each byte has been transferred. A short
// transfer is continued; one that makes no progress (the end of the file, a full disk) fails. A
// failure is an IoError with the path, the offset, the number of bytes and `what`.
//
// Threads: every method may be called from any thread. Memory and file must stay valid until the
// Pending is done. Destroying an engine waits for all that was started.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/device/device.h"
#include "tessera/device/pending.h"

namespace tessera {
class Config;
class Spans;
}  // namespace tessera

namespace tessera::tier {

using device::Pending;

// What O_DIRECT asks of offsets, lengths and memory, on every disk there is.
inline constexpr std::size_t kBlockBytes = 4096;
constexpr std::size_t whole_blocks(std::size_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// Host memory for transfers, aligned to kBlockBytes; of huge pages where the system has them: a
// direct request of 1 MiB in pages of 4 KiB is a list of 256 entries, and a virtual disk was seen
// to read half as fast.
device::Memory transfer_memory(std::size_t bytes);

// An open file; closed when it goes. If `is_direct`, offsets, lengths and memory must be multiples
// of kBlockBytes.
class IoFile {
 public:
  IoFile(std::string path, int fd, bool is_direct);
  ~IoFile();
  IoFile(const IoFile&) = delete;
  IoFile& operator=(const IoFile&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  bool is_direct() const { return is_direct_; }

 private:
  const std::string path_;
  const int fd_;
  const bool is_direct_;
};

enum class DirectIo : std::uint8_t {
  kAuto,  // past the page cache where the file system can do that in blocks of kBlockBytes
  kOn,    // ConfigError where it cannot
  kOff,
};

// `flags` as for open(2), without O_DIRECT; a new file has mode 0600 and is closed in programs that
// this one starts. IoError with path and remedy if it cannot be opened.
std::unique_ptr<IoFile> open_io_file(const std::string& path, int flags, DirectIo mode);

// Since the engine was made, of ranges that were done without failure.
struct IoCounts {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t num_reads = 0;  // ranges
  std::uint64_t num_writes = 0;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;  // "uring", "threads"
  // `what` names the data in errors: "exp_avg of parameter 'h.0.attn.weight'".
  virtual Pending start_read(const IoFile& file, std::uint64_t offset, std::byte* to,
                             std::size_t bytes, std::string what) = 0;
  virtual Pending start_write(const IoFile& file, std::uint64_t offset, const std::byte* from,
                              std::size_t bytes, std::string what) = 0;
  virtual IoCounts counts() const = 0;
};

enum class IoKind : std::uint8_t { kAuto, kUring, kThreads };

struct IoOptions {
  IoKind kind = IoKind::kAuto;
  std::size_t block_bytes = std::size_t{1} << 20;
  int queue_depth = 8;  // per thread
  int num_threads = 4;
  Spans* spans = nullptr;  // reads and writes in the trace; null: none. Outlives the engine.
};

// kAuto takes io_uring where it was built in and the kernel allows it, else threads; `notice` gets
// one sentence with the reason. kUring throws ConfigError with that reason instead.
std::unique_ptr<IoEngine> make_io_engine(const IoOptions& options,
                                         const std::function<void(const std::string&)>& notice);

}  // namespace tessera::tier
