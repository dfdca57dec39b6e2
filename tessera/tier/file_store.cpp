#include "tessera/tier/file_store.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/tier/checksum.h"

namespace tessera::tier {
namespace {

constexpr std::size_t kTidyFrom = 64;

FileStoreOptions checked(FileStoreOptions options) {
  TESSERA_INVARIANT(options.engine != nullptr && !options.directories.empty() &&
                        options.stripe_bytes % kBlockBytes == 0 && options.stripe_bytes > 0,
                    "a store of ", options.directories.size(), " directories with stripes of ",
                    options.stripe_bytes, " bytes");
  return options;
}

}  // namespace

Stripes::Stripes(std::size_t num_files, std::uint64_t stripe_bytes)
    : num_files_(num_files), stripe_bytes_(stripe_bytes) {
  TESSERA_INVARIANT(num_files > 0 && stripe_bytes > 0, num_files, " files with stripes of ",
                    stripe_bytes, " bytes");
}

std::vector<Stripes::Piece> Stripes::cut(std::uint64_t offset, std::size_t bytes) const {
  if (num_files_ == 1) {
    return bytes > 0 ? std::vector<Piece>{{0, offset, offset, bytes}} : std::vector<Piece>();
  }
  std::vector<Piece> pieces;
  for (const std::uint64_t end = offset + bytes; offset < end;) {
    const std::uint64_t stripe = offset / stripe_bytes_;
    const std::uint64_t inside = offset % stripe_bytes_;
    const std::uint64_t piece_bytes = std::min(stripe_bytes_ - inside, end - offset);
    pieces.push_back({static_cast<std::size_t>(stripe % num_files_),
                      stripe / num_files_ * stripe_bytes_ + inside, offset,
                      static_cast<std::size_t>(piece_bytes)});
    offset += piece_bytes;
  }
  return pieces;
}

std::uint64_t Stripes::file_bytes(std::size_t file, std::uint64_t store_bytes) const {
  const std::uint64_t whole = store_bytes / stripe_bytes_;  // stripes
  const std::uint64_t rounds = whole / num_files_;
  const std::uint64_t last = whole % num_files_;  // the file whose turn it is
  const std::uint64_t more = file < last    ? stripe_bytes_
                             : file == last ? store_bytes % stripe_bytes_
                                            : 0;
  return rounds * stripe_bytes_ + more;
}

// A read that is done when its bytes have arrived and have been compared, by whoever asks first:
// the threads that wait for data share the work, and none is needed for it alone.
class FileStore::VerifiedRead final : public device::PendingState {
 public:
  VerifiedRead(FileStore& store, Pending read, std::uint64_t offset, const std::byte* memory,
               std::size_t bytes)
      : store_(store), read_(std::move(read)), offset_(offset), memory_(memory), bytes_(bytes) {}

  // REQUIRES: the read is done. From now on the store is not needed.
  void finalize() {
    const std::lock_guard lock(mutex_);
    if (is_final_) {
      return;
    }
    is_final_ = true;
    try {
      read_.wait();
      store_.verify(offset_, memory_, bytes_);
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  bool done() override {
    if (!read_.done()) {
      return false;
    }
    finalize();
    return true;
  }

  void wait() override {
    read_.wait();
    finalize();
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  bool wait_for(std::chrono::nanoseconds limit) override {
    if (!read_.wait_for(limit)) {
      return false;
    }
    wait();
    return true;
  }

 private:
  FileStore& store_;
  const Pending read_;
  const std::uint64_t offset_;
  const std::byte* const memory_;
  const std::size_t bytes_;
  std::mutex mutex_;
  // Written once, under mutex_.
  bool is_final_ = false;
  std::exception_ptr error_;
};

FileStore::FileStore(FileStoreOptions options)
    : options_(checked(std::move(options))),
      stripes_(options_.directories.size(), options_.stripe_bytes) {
  for (const std::string& directory : options_.directories) {
    remove_stale(directory);
  }
  for (const std::string& directory : options_.directories) {
    files_.push_back(std::make_unique<ScratchFile>(directory, options_.name, options_.direct_io));
  }
  extend(whole_blocks(options_.reserved_bytes));
}

FileStore::~FileStore() {
  // Descriptors are given to others once they are closed: a late request would be theirs.
  for (const InFlight& request : in_flight_) {
    try {
      request.io.wait();
    } catch (...) {  // whoever holds the Pending is told
    }
    if (const auto read = request.verified.lock()) {
      read->finalize();
    }
  }
  if (options_.ledger != nullptr) {
    options_.ledger->discharge(Tier::kNvme, options_.role, capacity_);
    for (const std::vector<std::uint64_t>& checksums : checksums_) {
      options_.ledger->discharge(Tier::kHost, Role::kOther,
                                 checksums.size() * sizeof(std::uint64_t));
    }
  }
}

void FileStore::extend(std::uint64_t bytes) {
  for (std::size_t i = 0; i < files_.size(); ++i) {
    files_[i]->extend(stripes_.file_bytes(i, bytes));
  }
  if (options_.ledger != nullptr) {
    options_.ledger->charge(Tier::kNvme, options_.role, bytes - capacity_);
  }
  capacity_ = bytes;
}

std::uint64_t FileStore::allocate(std::size_t bytes, std::string name) {
  const std::uint64_t offset = bytes_;
  const std::uint64_t rounded = whole_blocks(bytes);
  if (offset + rounded > capacity_) {
    extend(offset + rounded);
  }
  if (options_.verify) {
    checksums_.emplace_back(rounded / kBlockBytes, zero_checksum());
    if (options_.ledger != nullptr) {
      options_.ledger->charge(Tier::kHost, Role::kOther,
                              checksums_.back().size() * sizeof(std::uint64_t));
    }
  }
  extents_.push_back({offset, rounded, std::move(name)});
  bytes_ += rounded;
  return offset;
}

template <typename Visit>
void FileStore::visit_checksums(std::uint64_t offset, std::size_t bytes, const Visit& visit) {
  const std::uint64_t end = offset + bytes;
  for (const StoreExtent* extent = &extent_at(extents_, offset); offset < end; ++extent) {
    std::vector<std::uint64_t>& checksums =
        checksums_[static_cast<std::size_t>(extent - extents_.data())];
    for (; offset < std::min(end, extent->offset + extent->bytes); offset += kBlockBytes) {
      visit(checksums[(offset - extent->offset) / kBlockBytes], offset);
    }
  }
}

void FileStore::verify(std::uint64_t offset, const std::byte* memory, std::size_t bytes) {
  visit_checksums(offset, bytes, [&](std::uint64_t expected, std::uint64_t at) {
    const std::uint64_t checksum = block_checksum(memory + (at - offset));
    if (checksum == expected) {
      return;
    }
    const Stripes::Piece piece = stripes_.cut(at, kBlockBytes).front();
    throw CorruptError(detail::concat(
        "the ", kBlockBytes, " bytes at offset ", ScratchFile::kDataOffset + piece.offset_in_file,
        " of ", printable(files_[piece.file]->path(), 400),
        " are not those that were written (checksum ", checksum, ", expected ", expected, "); ",
        extent_at(extents_, at).name,
        "; somebody else wrote to the file, or the disk is damaged: use another"));
  });
}

template <typename StartPiece>
Pending FileStore::start_pieces(std::uint64_t offset, std::size_t bytes,
                                const StartPiece& start_piece) {
  std::vector<Pending> parts;
  for (const Stripes::Piece& piece : stripes_.cut(offset, bytes)) {
    try {
      parts.push_back(start_piece(
          files_[piece.file]->io_file(), ScratchFile::kDataOffset + piece.offset_in_file,
          piece.offset - offset, piece.bytes, names_in(extents_, piece.offset, piece.bytes)));
    } catch (...) {
      // Parts that were started use the caller's memory: they must be waited for, not thrown over.
      parts.push_back(Pending::failed(std::current_exception()));
      break;
    }
  }
  return Pending::all(std::move(parts));
}

Pending FileStore::start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) {
  check_store_range(*this, offset, to, bytes);
  if (bytes == 0) {
    return Pending();
  }
  read_bytes_ += bytes;
  Pending io = start_pieces(offset, bytes,
                            [&](const IoFile& file, std::uint64_t at, std::uint64_t inside,
                                std::size_t count, std::string what) {
                              return options_.engine->start_read(file, at, to + inside, count,
                                                                 std::move(what));
                            });
  if (!options_.verify) {
    keep({io, {}});
    return io;
  }
  auto verified = std::make_shared<VerifiedRead>(*this, io, offset, to, bytes);
  keep({std::move(io), verified});
  return Pending(std::move(verified));
}

Pending FileStore::start_write(std::uint64_t offset, const std::byte* from, std::size_t bytes) {
  check_store_range(*this, offset, from, bytes);
  if (bytes == 0) {
    return Pending();
  }
  written_bytes_ += bytes;
  if (options_.verify) {
    visit_checksums(offset, bytes, [&](std::uint64_t& checksum, std::uint64_t at) {
      checksum = block_checksum(from + (at - offset));
    });
  }
  Pending io = start_pieces(offset, bytes,
                            [&](const IoFile& file, std::uint64_t at, std::uint64_t inside,
                                std::size_t count, std::string what) {
                              return options_.engine->start_write(file, at, from + inside, count,
                                                                  std::move(what));
                            });
  keep({io, {}});
  return io;
}

void FileStore::keep(InFlight request) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(request));
  if (in_flight_.size() >= tidy_at_) {
    std::erase_if(in_flight_,
                  [](const InFlight& old) { return old.io.done() && old.verified.expired(); });
    tidy_at_ = std::max(kTidyFrom, 2 * in_flight_.size());
  }
}

}  // namespace tessera::tier
