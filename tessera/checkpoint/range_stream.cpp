#include "tessera/checkpoint/range_stream.h"

#include <fcntl.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {

using tier::kBlockBytes;

namespace {

// With fewer in a slot, what is read twice would be too much.
constexpr std::uint64_t kLeastGrains = 8;

}  // namespace

RangeFile::RangeFile(const std::string& path, std::uint64_t file_bytes)
    : bytes(file_bytes),
      file(tier::open_io_file(path, O_RDONLY | O_NONBLOCK, tier::DirectIo::kAuto)),
      cached(path, O_RDONLY | O_NONBLOCK, "open") {}

std::shared_ptr<RangeFile> RangeFiles::open(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = open_.find(file);
  if (found != open_.end()) {
    return found->second;
  }
  if (open_.size() >= kMaxOpen) {
    open_.clear();  // what is being read stays open until that has ended
  }
  const Name& name = names_[static_cast<std::size_t>(file)];
  return open_.emplace(file, std::make_shared<RangeFile>(name.path, name.bytes)).first->second;
}

Staging::Staging(std::size_t bytes)
    : slot_bytes_(std::max(kBlockBytes, bytes / kNumSlots / kBlockBytes * kBlockBytes)),
      memory_(tier::transfer_memory(kNumSlots * (kHeadBytes + slot_bytes_))) {}

RangeStream::RangeStream(RangeFiles& files, tier::IoEngine& io, const Staging& staging,
                         const std::vector<FileRange>& ranges)
    : files_(files), io_(io), staging_(staging), ranges_(ranges) {}

RangeStream::~RangeStream() {
  for (const Slot& slot : slots_) {
    device::wait_ignoring_failure(slot.pending);
  }
}

std::optional<RangeStream::Piece> RangeStream::next() {
  // The slot that was taken last is free now; at the start all are.
  while (num_started_ < num_taken_ + slots_.size() && start(num_started_ % slots_.size())) {
    ++num_started_;
  }
  if (num_taken_ == num_started_) {
    return std::nullopt;
  }
  const Slot& slot = slots_[num_taken_++ % slots_.size()];
  slot.pending.wait();
  return slot.piece;
}

bool RangeStream::start(std::size_t index) {
  while (range_ < ranges_.size() && position_ == ranges_[range_].bytes) {
    ++range_;
    position_ = 0;
  }
  if (range_ == ranges_.size()) {
    return false;
  }
  const FileRange& range = ranges_[range_];
  Slot& slot = slots_[index];
  slot.file = files_.open(range.file);
  const std::uint64_t begin = range.offset + position_;
  const std::uint64_t first_block = begin / kBlockBytes * kBlockBytes;
  std::uint64_t bytes =
      std::min(range.bytes - position_, staging_.slot_bytes() - (begin - first_block));
  if (bytes < range.bytes - position_ && bytes >= kLeastGrains * range.grain) {
    bytes -= bytes % range.grain;
  }
  const std::uint64_t end = begin + bytes;
  // Where direct reads must stop: a block that the file does not fill is no whole one.
  const std::uint64_t limit = slot.file->bytes / kBlockBytes * kBlockBytes;
  const std::uint64_t read_end =
      slot.file->file->is_direct() ? std::min<std::uint64_t>(tier::whole_blocks(end), limit) : end;
  std::byte* const memory = staging_.slot(index);
  slot.pending = {};
  if (read_end > first_block) {
    slot.pending = io_.start_read(*slot.file->file, first_block, memory,
                                  static_cast<std::size_t>(read_end - first_block), range.what);
  }
  if (end > read_end) {
    const std::uint64_t rest = std::max(first_block, read_end);
    const std::size_t done = slot.file->cached.read_at(rest, memory + (rest - first_block),
                                                       static_cast<std::size_t>(end - rest));
    TESSERA_CHECK(done == end - rest, CorruptError, printable(slot.file->cached.path(), 400),
                  ": offset ", rest + done, ": the file has become shorter since it was opened (",
                  range.what, ")");
  }
  position_ += bytes;
  slot.piece = {range_,
                {memory + (begin - first_block), static_cast<std::size_t>(bytes)},
                position_ == range.bytes};
  return true;
}

}  // namespace tessera::checkpoint
