// Ranges of files, one after the other, through a few slots of staging; internal to checkpoint.
//
// Several reads are in flight while one slot is looked at. Reads are of whole blocks at block
// boundaries where the file system moves data past the page cache; what lies behind a file's last
// whole block comes through the cache.
//
// Invariants:
//  (1) Memory: the staging, whatever is read.
//  (2) When a stream is gone, nothing of it is in flight.
//
// Threads: one caller at a time; several streams may share the files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/posix_file.h"
#include "tessera/device/device.h"
#include "tessera/tier/io_engine.h"

namespace tessera::checkpoint {

// A file that is read both ways.
struct RangeFile {
  explicit RangeFile(const std::string& path, std::uint64_t file_bytes);
  const std::uint64_t bytes;
  const std::unique_ptr<tier::IoFile> file;
  const PosixFile cached;
};

// The files of a checkpoint, open as long as they are in use or among the last few. From any
// thread.
class RangeFiles {
 public:
  struct Name {
    std::string path;
    std::uint64_t bytes = 0;
  };
  explicit RangeFiles(std::vector<Name> names) : names_(std::move(names)) {}
  std::shared_ptr<RangeFile> open(int file);

 private:
  static constexpr std::size_t kMaxOpen = 64;

  const std::vector<Name> names_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<RangeFile>> open_;  // guarded by mutex_
};

// A slot has room for blocks, and in front of them for what a reader prepends to a piece.
class Staging {
 public:
  static constexpr std::size_t kNumSlots = 8;
  static constexpr std::size_t kHeadBytes = tier::kBlockBytes;

  // In all, about; at least one block per slot.
  explicit Staging(std::size_t bytes);
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(std::size_t index) const {
    return memory_.data() + index * (kHeadBytes + slot_bytes_) + kHeadBytes;
  }

 private:
  std::size_t slot_bytes_;
  device::Memory memory_;
};

struct FileRange {
  int file = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::string what;  // in errors
  // Pieces have a multiple of it where a slot has room for several, so that whoever takes whole
  // ones need not put them together: a block at a seam is read twice for it.
  std::uint64_t grain = 1;
};

class RangeStream {
 public:
  // All outlive the stream; one stream at a time uses a staging.
  RangeStream(RangeFiles& files, tier::IoEngine& io, const Staging& staging,
              const std::vector<FileRange>& ranges);
  ~RangeStream();
  RangeStream(const RangeStream&) = delete;
  RangeStream& operator=(const RangeStream&) = delete;

  // Bytes of one range; kHeadBytes in front of them may be overwritten.
  struct Piece {
    std::size_t range = 0;
    std::span<std::byte> bytes;
    bool is_last = false;  // of its range
  };
  // The next ones, valid until the next call; nothing at the end. IoError; CorruptError for a file
  // that has become shorter.
  std::optional<Piece> next();

 private:
  struct Slot {
    Piece piece;
    std::shared_ptr<RangeFile> file;
    device::Pending pending;
  };

  // Reads the next piece into this slot; false if there is none.
  bool start(std::size_t index);

  RangeFiles& files_;
  tier::IoEngine& io_;
  const Staging& staging_;
  const std::vector<FileRange>& ranges_;
  std::array<Slot, Staging::kNumSlots> slots_;
  std::size_t num_started_ = 0;
  std::size_t num_taken_ = 0;
  std::size_t range_ = 0;  // that is being read, up to position_
  std::uint64_t position_ = 0;
};

}  // namespace tessera::checkpoint
