// One preallocated file for data that lives as long as a run does, and for nothing else in the
// user's directory.
//
//   <directory>/tessera-<run>-rank<rank>-<role>.scratch      mode 0600
//
// The first block is a header with a magic number and the file's own name; data begin behind it.
// The file is locked as long as it is open, and removed when it is closed. A process that ends
// without closing it calls unlink_scratch_files(). After a crash or kill -9 it stays behind,
// without the lock: that is what remove_stale() looks for.
//
// Invariants:
//  (1) A file with a header is, or was, locked: the lock comes first.
//  (2) A file is removed only if its name has our form, its header has our magic and that same
//      name, and nobody holds its lock. Nothing else is ever removed, moved or written to.
//
// Threads: io_file() may be used from any thread; everything else from one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {

// ConfigError if `path` is missing, no directory, not writable, or memory instead of a disk (tmpfs,
// ramfs). Creates nothing.
void check_scratch_directory(const std::string& path);

// Removes the files that earlier runs left in `directory`; their names. What cannot be opened or
// removed stays.
std::vector<std::string> remove_stale(const std::string& directory);

// Removes the names of all scratch files that this process has open: for one that is about to end
// without its destructors. Async-signal-safe; the files stay usable until the process ends.
void unlink_scratch_files() noexcept;

struct ScratchName {
  std::string run;  // letters, digits, '_', '.', '-'; unique per run, and the same on all ranks
  int rank = 0;
  std::string role;  // lower-case letters: "states"
};

class ScratchFile {
 public:
  // Where data begin in the file.
  static constexpr std::uint64_t kDataOffset = kBlockBytes;

  // Creates it, with room for nothing. IoError if it exists; ConfigError for a bad name, and where
  // `mode` cannot be had.
  ScratchFile(const std::string& directory, const ScratchName& name, DirectIo mode);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  const std::string& path() const { return path_; }
  const IoFile& io_file() const { return *io_file_; }
  // Of data.
  std::uint64_t bytes() const { return bytes_; }
  // Room for `bytes` of data in all; new ones are zero. The blocks are taken from the file system
  // now, so that a full disk shows here: IoError with the numbers, and the file is as before.
  void extend(std::uint64_t bytes);

 private:
  // Open, locked, and removed when it goes.
  class Owned;

  const std::string path_;
  std::unique_ptr<Owned> owned_;
  std::unique_ptr<IoFile> io_file_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tessera::tier
