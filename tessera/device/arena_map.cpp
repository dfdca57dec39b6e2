#include "tessera/device/arena_map.h"

#include <algorithm>
#include <iterator>

#include "tessera/core/error.h"

namespace tessera::device {

ArenaMap::ArenaMap(std::size_t capacity_bytes)
    : capacity_bytes_(capacity_bytes / kArenaAlignment * kArenaAlignment) {
  if (capacity_bytes_ > 0) {
    add_hole({0, capacity_bytes_});
  }
}

std::optional<Extent> ArenaMap::place(std::size_t bytes) {
  if (bytes == 0) {
    return Extent{};
  }
  if (bytes > capacity_bytes_) {
    return std::nullopt;
  }
  const auto best = holes_by_bytes_.lower_bound({round_to_arena(bytes), 0});
  if (best == holes_by_bytes_.end()) {
    return std::nullopt;
  }
  const Extent extent{best->second, round_to_arena(bytes)};
  take(holes_.find(extent.offset), extent);
  return extent;
}

bool ArenaMap::can_claim(std::size_t offset, std::size_t bytes) const {
  if (offset % kArenaAlignment != 0 || offset > capacity_bytes_ ||
      bytes > capacity_bytes_ - offset) {
    return false;
  }
  return bytes == 0 || hole_around({offset, round_to_arena(bytes)}) != holes_.end();
}

Extent ArenaMap::claim(std::size_t offset, std::size_t bytes) {
  TESSERA_INVARIANT(offset % kArenaAlignment == 0, "planned offset ", offset,
                    " is not a multiple of ", kArenaAlignment);
  TESSERA_INVARIANT(offset <= capacity_bytes_ && bytes <= capacity_bytes_ - offset,
                    "planned block of ", bytes, " bytes at ", offset, " does not fit an arena of ",
                    capacity_bytes_);
  if (bytes == 0) {
    return {offset, 0};
  }
  const Extent extent{offset, round_to_arena(bytes)};
  const auto hole = hole_around(extent);
  if (hole == holes_.end()) {
    // The last block that starts before our end reaches furthest.
    const auto in_the_way = std::prev(blocks_.lower_bound(extent.end()));
    TESSERA_INVARIANT(false, "planned block [", extent.offset, ", ", extent.end(),
                      ") overlaps the block [", in_the_way->first, ", ",
                      in_the_way->first + in_the_way->second, ") that is still taken");
  }
  take(hole, extent);
  return extent;
}

void ArenaMap::release(const Extent& extent) {
  if (extent.bytes == 0) {
    return;
  }
  const auto block = blocks_.find(extent.offset);
  TESSERA_INVARIANT(block != blocks_.end() && block->second == extent.bytes, "release of [",
                    extent.offset, ", ", extent.end(), "), which is not a block of the arena");
  blocks_.erase(block);
  used_bytes_ -= extent.bytes;

  Extent hole = extent;
  const auto after = holes_.find(extent.end());
  if (after != holes_.end()) {
    hole.bytes += after->second;
    remove_hole(after);
  }
  const auto next = holes_.lower_bound(extent.offset);
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.offset) {
      hole = {before->first, before->second + hole.bytes};
      remove_hole(before);
    }
  }
  add_hole(hole);
}

ArenaMapStats ArenaMap::stats() const {
  ArenaMapStats stats;
  stats.capacity_bytes = capacity_bytes_;
  stats.used_bytes = used_bytes_;
  stats.peak_used_bytes = peak_used_bytes_;
  stats.num_blocks = blocks_.size();
  stats.num_holes = holes_.size();
  stats.largest_hole_bytes = holes_by_bytes_.empty() ? 0 : holes_by_bytes_.rbegin()->first;
  return stats;
}

ArenaMap::Extents::const_iterator ArenaMap::hole_around(const Extent& extent) const {
  const auto after = holes_.upper_bound(extent.offset);
  if (after == holes_.begin()) {
    return holes_.end();
  }
  const auto hole = std::prev(after);
  return hole->first + hole->second >= extent.end() ? hole : holes_.end();
}

void ArenaMap::take(Extents::const_iterator hole, const Extent& extent) {
  const Extent whole{hole->first, hole->second};
  remove_hole(hole);
  if (extent.offset > whole.offset) {
    add_hole({whole.offset, extent.offset - whole.offset});
  }
  if (whole.end() > extent.end()) {
    add_hole({extent.end(), whole.end() - extent.end()});
  }
  blocks_.emplace(extent.offset, extent.bytes);
  used_bytes_ += extent.bytes;
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
}

void ArenaMap::add_hole(const Extent& extent) {
  holes_.emplace(extent.offset, extent.bytes);
  holes_by_bytes_.emplace(extent.bytes, extent.offset);
}

void ArenaMap::remove_hole(Extents::const_iterator hole) {
  holes_by_bytes_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

}  // namespace tessera::device
