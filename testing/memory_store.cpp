#include "testing/memory_store.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::tier {

using device::StreamKind;

MemoryStore::MemoryStore(device::Device& device, Tier tier, Role role, std::size_t reserved_bytes)
    : device_(device), tier_(tier), role_(role) {
  grow(whole_blocks(reserved_bytes));
}

std::uint64_t MemoryStore::allocate(std::size_t bytes, std::string name) {
  const std::size_t offset = bytes_;
  const std::size_t rounded = whole_blocks(bytes);
  if (offset + rounded > memory_.bytes()) {
    grow(offset + rounded);
  }
  extents_.push_back({offset, rounded, std::move(name)});
  bytes_ += rounded;
  return offset;
}

void MemoryStore::grow(std::size_t bytes) {
  device::Memory larger = device_.allocate(tier_, bytes, role_, kBlockBytes);
  device::Stream& stream = device_.stream(StreamKind::kWrite);
  std::vector<Pending> parts;
  if (bytes_ > 0) {
    parts.push_back(device_.start_copy(larger.data(), memory_.data(), bytes_, stream));
  }
  if (bytes > bytes_) {
    parts.push_back(device_.start_fill(larger.data() + bytes_, 0, bytes - bytes_, stream));
  }
  Pending::all(std::move(parts)).wait();
  memory_ = std::move(larger);
}

Pending MemoryStore::start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) {
  check_store_range(*this, offset, to, bytes);
  if (bytes == 0) {
    return Pending();
  }
  read_bytes_ += bytes;
  return device_.start_copy(to, memory_.data() + offset, bytes, device_.stream(StreamKind::kRead));
}

Pending MemoryStore::start_write(std::uint64_t offset, const std::byte* from, std::size_t bytes) {
  check_store_range(*this, offset, from, bytes);
  if (bytes == 0) {
    return Pending();
  }
  written_bytes_ += bytes;
  return device_.start_copy(memory_.data() + offset, from, bytes,
                            device_.stream(StreamKind::kWrite));
}

}  // namespace tessera::tier
