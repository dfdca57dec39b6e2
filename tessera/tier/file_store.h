// A store in scratch files: one per directory, striped over them.
//
// Exact: files have the bytes that were allocated, or reserved if that is more, plus one block each
// for the header. The ledger is charged those bytes without the headers.
//
// With `verify` every block has a checksum in memory (8 bytes per 4096, charged as Role::kOther of
// the host), computed when its write is started, by the thread that starts it, and compared by
// whoever first waits for a read, at about 10 GB/s per core. Blocks that were never written are
// zero.
//
// Data of an earlier run are of no use to this one: files that it left behind are removed.
//
// Threads: as in store.h. Destroying it waits for what is in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/tier/scratch_file.h"
#include "tessera/tier/store.h"

namespace tessera::tier {

// Where the bytes of a store lie when several files share them: in turn, a stripe in each.
//
//   store    | 0 | 1 | 2 | 3 | 4 | 5 | 6 |      three files
//   file 0   | 0 | 3 | 6 |
//   file 1   | 1 | 4 |
//   file 2   | 2 | 5 |
class Stripes {
 public:
  // One file has one stripe that never ends.
  Stripes(std::size_t num_files, std::uint64_t stripe_bytes);

  struct Piece {
    std::size_t file = 0;
    std::uint64_t offset_in_file = 0;
    std::uint64_t offset = 0;  // in the store
    std::size_t bytes = 0;
  };
  // In the order of the store.
  std::vector<Piece> cut(std::uint64_t offset, std::size_t bytes) const;
  // What a file holds of a store of this size.
  std::uint64_t file_bytes(std::size_t file, std::uint64_t store_bytes) const;

 private:
  const std::uint64_t num_files_;
  const std::uint64_t stripe_bytes_;
};

struct FileStoreOptions {
  // Any that can be written to; check_scratch_directory() says which are good for a run.
  std::vector<std::string> directories;
  ScratchName name;
  Role role = Role::kOther;  // where the ledger charges it, under Tier::kNvme
  bool verify = false;
  DirectIo direct_io = DirectIo::kAuto;
  std::uint64_t reserved_bytes =
      0;  // taken at once: a file in one piece, a full disk known at start
  std::uint64_t stripe_bytes = std::uint64_t{1} << 20;  // whole blocks
  // Both outlive the store.
  IoEngine* engine = nullptr;
  Ledger* ledger = nullptr;  // may be null
};

class FileStore final : public Store {
 public:
  // IoError if the files cannot be made or the disk is full; then none is left behind.
  explicit FileStore(FileStoreOptions options);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  Tier tier() const override { return Tier::kNvme; }
  std::uint64_t allocate(std::size_t bytes, std::string name) override;
  std::uint64_t bytes() const override { return bytes_; }
  const std::vector<StoreExtent>& extents() const override { return extents_; }
  std::byte* data() override { return nullptr; }
  Pending start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) override;
  Pending start_write(std::uint64_t offset, const std::byte* from, std::size_t bytes) override;
  StoreStats stats() const override { return {read_bytes_.load(), written_bytes_.load()}; }

  std::size_t num_files() const { return files_.size(); }
  const ScratchFile& file(std::size_t index) const { return *files_[index]; }

 private:
  class VerifiedRead;
  struct InFlight {
    Pending io;
    // Of a read that is verified: as long as somebody holds it, it may call back.
    std::weak_ptr<VerifiedRead> verified;
  };

  void extend(std::uint64_t bytes);
  // With the checksum and the offset of each block in the range.
  template <typename Visit>
  void visit_checksums(std::uint64_t offset, std::size_t bytes, const Visit& visit);
  // CorruptError for the first block of `memory` that is not what was written to `offset`.
  void verify(std::uint64_t offset, const std::byte* memory, std::size_t bytes);
  template <typename StartPiece>
  Pending start_pieces(std::uint64_t offset, std::size_t bytes, const StartPiece& start_piece);
  void keep(InFlight request);

  const FileStoreOptions options_;
  const Stripes stripes_;
  std::vector<std::unique_ptr<ScratchFile>> files_;  // by directory
  std::uint64_t capacity_ = 0;                       // room in the files; charged
  std::uint64_t bytes_ = 0;                          // of extents
  std::vector<StoreExtent> extents_;
  std::vector<std::vector<std::uint64_t>> checksums_;  // by extent and block; empty without verify
  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> written_bytes_{0};

  std::mutex mutex_;
  std::vector<InFlight> in_flight_;  // guarded by mutex_; what is done leaves now and then
  std::size_t tidy_at_ = 0;          // guarded by mutex_; the number at which it does
};

}  // namespace tessera::tier
