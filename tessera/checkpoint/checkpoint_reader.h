// A complete checkpoint, for reading: any range of any tensor, whichever fragments it lies in.
//
// Opening it compares every file with the manifest: there, of that size, and a safetensors file
// whose tensors are the fragments. CorruptError says which file, and what is wrong. A fragment that
// is read whole is compared with its checksum on the way.
//
// Reads are block by block past the page cache where the file system can do that, a few in flight
// (tier/io_engine.h), through one staging buffer whose size does not depend on the tensor's.
//
// Threads: as many callers at a time as the options say; Visit does not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/tier/io_engine.h"

namespace tessera::checkpoint {

struct ReaderOptions {
  // Null: one of its own. Outlives the reader.
  tier::IoEngine* io = nullptr;
  std::size_t staging_bytes = std::size_t{32} << 20;  // of all callers together
  int num_callers = 1;                                // that read at a time
};

class CheckpointReader {
 public:
  // A save, or a directory of saves: then its newest. ConfigError if it is neither.
  explicit CheckpointReader(const std::string& path, const ReaderOptions& options = {});
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const;  // of the save
  const Manifest& manifest() const;

  // Gives elements [begin, begin + numel) in order, in pieces that are whole elements and lie in
  // memory that is valid during the call, at any address; a piece begins at a multiple of 8 bytes
  // of the tensor if `begin` does. IoError and CorruptError name file and tensor. After an error
  // some pieces may have been given. REQUIRES: `tensor` is of manifest(), or made of its fragments.
  using Visit = std::function<void(std::int64_t begin, std::span<const std::byte> bytes)>;
  void read(const StoredTensor& tensor, std::int64_t begin, std::int64_t numel,
            const Visit& visit) const;
  // The same of several, in their order: while one is visited, those behind it are being read.
  // Pieces are of whole steps of kTileStep elements, counted from the beginning of each fragment's
  // part, where the staging has room for that. REQUIRES: none is stored as blocks.
  struct Request {
    const StoredTensor* tensor = nullptr;
    std::int64_t begin = 0;
    std::int64_t numel = 0;
    Visit visit;
  };
  void read(std::span<const Request> requests) const;
  // A tensor that is stored as blocks is decoded on the way. These are its bytes as they are
  // stored, of elements [begin, begin + numel), put where `places` says that they lie behind `to`,
  // which is zero. REQUIRES: begin is a multiple of the format's step.
  void read_blocks(const StoredTensor& tensor, std::int64_t begin, std::int64_t numel,
                   const shard::StoredBytes& places, std::byte* to) const;
  // All of a fragment's bytes.
  void read(const Fragment& fragment, DType dtype, const Visit& visit) const;
  // All of a fragment's bytes as they lie in the file, whatever they are; returns the checksum
  // that they have, whatever the manifest says.
  using VisitBytes = std::function<void(std::span<const std::byte> bytes)>;
  std::uint64_t read_unchecked(const Fragment& fragment, std::uint64_t num_bytes,
                               const VisitBytes& visit) const;

  // For messages: "tensor "exp_avg" of parameter "h.0.weight"".
  std::string describe(const Fragment& fragment) const;
  std::string file_path(const Fragment& fragment) const;

 private:
  struct Impl;
  struct Parts;
  class Reading;
  template <typename Use>
  void stream_parts(const Reading& reading, const Parts& parts, const Use& use) const;
  void read_decoded(const StoredTensor& tensor, std::int64_t begin, std::int64_t numel,
                    const Visit& visit) const;

  std::unique_ptr<Impl> impl_;
};

struct VerifyProblem {
  std::string file;  // its path
  std::string text;
};

// Reads every byte that belongs to a tensor and compares it with its checksum; every problem, not
// the first alone. Where the bytes are those of another fragment it names that one.
std::vector<VerifyProblem> verify(const CheckpointReader& reader);

}  // namespace tessera::checkpoint
