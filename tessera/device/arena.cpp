#include "tessera/device/arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::device {

Arena::Arena(Device& device, std::size_t capacity_bytes, Role role)
    : device_(device),
      role_(role),
      region_(device.allocate(Tier::kDevice, capacity_bytes, role, kArenaAlignment)),
      map_(capacity_bytes) {}

// The memory must not go before the work; failures are kept by their streams.
Arena::~Arena() {
  for (const auto& [offset, fence] : fences_) {
    wait_ignoring_failure(fence.pending);
  }
  for (const Retired& retired : retired_) {
    wait_ignoring_failure(retired.last_use);
  }
}

ArenaBlock Arena::allocate(std::size_t bytes, Stream& stream) {
  free_retired();
  const std::optional<Extent> extent = map_.place(bytes);
  return extent ? hand_out(*extent, bytes, stream) : overflow(bytes);
}

ArenaBlock Arena::allocate_at(std::size_t offset, std::size_t bytes, Stream& stream) {
  free_retired();
  return hand_out(map_.claim(offset, bytes), bytes, stream);
}

ArenaBlock Arena::hand_out(const Extent& extent, std::size_t bytes, Stream& stream) {
  ArenaBlock block;
  block.data = bytes == 0 ? nullptr : region_.data() + extent.offset;
  block.bytes = bytes;
  block.extent = extent;
  if (wait_for_fences(extent, stream)) {
    // The fences are gone from the books, so the block itself remembers them: it may come back
    // without ever having been used on `stream`, with a last use that is not behind them.
    block.ready = stream.record();
  }
  return block;
}

bool Arena::wait_for_fences(const Extent& extent, Stream& stream) {
  if (extent.bytes == 0) {
    return false;
  }
  auto next = fences_.upper_bound(extent.offset);
  if (next != fences_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > extent.offset) {
      next = before;
    }
  }
  bool has_waited = false;
  while (next != fences_.end() && next->first < extent.end()) {
    const std::size_t start = next->first;
    const std::size_t end = start + next->second.bytes;
    const Pending pending = next->second.pending;
    next = fences_.erase(next);
    if (start < extent.offset) {
      fences_.emplace(start, Fence{extent.offset - start, pending});
    }
    if (end > extent.end()) {
      fences_.emplace(extent.end(), Fence{end - extent.end(), pending});
    }
    stream.wait(pending);
    has_waited = true;
  }
  return has_waited;
}

ArenaBlock Arena::overflow(std::size_t bytes) {
  Memory memory = device_.allocate(Tier::kDevice, bytes, role_, kArenaAlignment);
  ArenaBlock block;
  block.data = memory.data();
  block.bytes = bytes;
  block.is_overflow = true;
  overflows_.emplace(block.data, std::move(memory));
  ++num_overflows_;
  overflow_bytes_ += bytes;
  peak_overflow_bytes_ = std::max(peak_overflow_bytes_, overflow_bytes_);
  return block;
}

void Arena::release(ArenaBlock block, Pending last_use) {
  if (block.is_overflow) {
    const auto found = overflows_.find(block.data);
    TESSERA_INVARIANT(found != overflows_.end(), "release of an overflow of ", block.bytes,
                      " bytes that this arena does not hold");
    retired_.push_back({std::move(found->second), std::move(last_use)});
    overflows_.erase(found);
    free_retired();
    return;
  }
  map_.release(block.extent);
  Pending fence = Pending::all({std::move(last_use), std::move(block.ready)});
  if (block.extent.bytes > 0 && fence.state() != nullptr) {
    fences_.emplace(block.extent.offset, Fence{block.extent.bytes, std::move(fence)});
  }
}

void Arena::free_retired() {
  std::erase_if(retired_, [this](const Retired& retired) {
    if (!retired.last_use.done()) {
      return false;
    }
    overflow_bytes_ -= retired.memory.bytes();
    return true;
  });
}

ArenaStats Arena::stats() const {
  ArenaStats stats;
  stats.region = map_.stats();
  stats.num_overflows = num_overflows_;
  stats.overflow_bytes = overflow_bytes_;
  stats.peak_overflow_bytes = peak_overflow_bytes_;
  return stats;
}

void Arena::reset_peaks() {
  map_.reset_peak();
  peak_overflow_bytes_ = overflow_bytes_;
}

}  // namespace tessera::device
