// A safetensors file whose tensors are appended in any order, and whose header comes last.
//
// The header's room is taken at the start, from names and sizes, and is a multiple of the disk's
// blocks; so data begin at a block, and leave in whole blocks past the page cache where the file
// system can do that, several in flight. Memory: `staging_bytes`, whatever the tensors' sizes.
//
//   | length, JSON, spaces | tensors in the order of begin(), without gaps |
//   0                      a multiple of kBlockBytes
//
// Invariants:
//  (1) The header is written when everything behind it has been: a file without finish() has none,
//      and is nothing that a reader takes.
//  (2) After a failure, which is an IoError with the path and a remedy, finish() fails with it, and
//      there is no header.
//
// Threads: one caller at a time, but for fill() and fail().
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/tier/io_engine.h"

namespace tessera::checkpoint {

struct WriterOptions {
  tier::IoEngine* io = nullptr;  // outlives the writer
  // Rounded down to buffers of whole blocks: most are being written while some are filled.
  std::size_t staging_bytes = std::size_t{32} << 20;
  tier::DirectIo direct = tier::DirectIo::kAuto;
};

// Where a tensor lies, and what it is.
struct WrittenTensor {
  std::uint64_t offset = 0;  // from the start of the file
  std::uint64_t xxh3 = 0;    // of what was appended
};

// Bytes of the file that belong to a tensor's next ones.
struct FilePlace {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

class FragmentWriter {
 public:
  // Makes the file, and takes its space on the disk, so that a full one is known now. IoError, also
  // if there is such a file; ConfigError for what the format cannot say.
  // `tensors`: all that will be appended, in the order of their numbers.
  FragmentWriter(const std::string& path, std::vector<TensorEntry> tensors,
                 const WriterOptions& options);
  // Waits for what is in flight. The file stays as it is.
  ~FragmentWriter();
  FragmentWriter(const FragmentWriter&) = delete;
  FragmentWriter& operator=(const FragmentWriter&) = delete;

  // The next bytes belong to this tensor, which has not begun yet. REQUIRES: the one before is
  // complete.
  void begin(std::size_t tensor);
  void append(std::span<const std::byte> bytes);
  // In place of append(), where several threads have the bytes: this is where the next ones belong,
  // and fill() brings them, from any thread, in parts of any size that begin at `at`, each byte
  // once. It waits until the staging has got that far: REQUIRES: nobody who has bytes of an earlier
  // place waits for whom fills a later one. Checksums are the caller's.
  FilePlace place(std::uint64_t bytes);
  void fill(const FilePlace& place, std::uint64_t at, std::span<const std::byte> bytes);
  // Some bytes never come: ends every fill(), now and later. From any thread.
  void fail(std::exception_ptr error);
  // Waits for all writes; header, sync. REQUIRES: all tensors are complete.
  void finish();

  const WrittenTensor& written(std::size_t tensor) const;  // once it is complete
  std::uint64_t file_bytes() const;                        // in the end

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
