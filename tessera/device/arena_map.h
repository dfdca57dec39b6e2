// Which bytes of an arena are taken: offsets only, no memory.
//
// Invariants:
//  (1) Blocks and holes cover [0, capacity) without overlap; two holes never touch.
//  (2) Offsets and lengths inside are multiples of kArenaAlignment; requests are rounded up.
//  (3) The same calls give the same offsets: best fit takes the smallest hole that is large enough,
//      of equal ones the lowest.
// A block of zero bytes takes nothing and is legal everywhere; it has no place to be confused with.
//
// Threads: none of its own; one caller at a time.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tessera::device {

inline constexpr std::size_t kArenaAlignment = 256;

// REQUIRES: bytes is at most the largest std::size_t less 255.
constexpr std::size_t round_to_arena(std::size_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

struct Extent {
  std::size_t offset = 0;
  std::size_t bytes = 0;  // a multiple of kArenaAlignment

  std::size_t end() const { return offset + bytes; }
  bool operator==(const Extent&) const = default;
};

struct ArenaMapStats {
  std::size_t capacity_bytes = 0;
  std::size_t used_bytes = 0;
  std::size_t peak_used_bytes = 0;
  std::size_t num_blocks = 0;
  std::size_t num_holes = 0;
  std::size_t largest_hole_bytes = 0;

  std::size_t free_bytes() const { return capacity_bytes - used_bytes; }
};

class ArenaMap {
 public:
  // Rounded down to kArenaAlignment.
  explicit ArenaMap(std::size_t capacity_bytes);

  // Nothing if no hole is large enough.
  std::optional<Extent> place(std::size_t bytes);
  // A planned block. Throws InternalError, with the block that is in the way, if these bytes are
  // taken, outside, or misaligned: see can_claim().
  Extent claim(std::size_t offset, std::size_t bytes);
  bool can_claim(std::size_t offset, std::size_t bytes) const;
  // Throws InternalError unless exactly this extent is taken.
  void release(const Extent& extent);

  ArenaMapStats stats() const;
  void reset_peak() { peak_used_bytes_ = used_bytes_; }

 private:
  using Extents = std::map<std::size_t, std::size_t>;  // offset to bytes

  // The hole around all of the extent, or the end.
  Extents::const_iterator hole_around(const Extent& extent) const;
  void take(Extents::const_iterator hole, const Extent& extent);
  void add_hole(const Extent& extent);
  void remove_hole(Extents::const_iterator hole);

  const std::size_t capacity_bytes_;
  Extents blocks_;
  Extents holes_;
  std::set<std::pair<std::size_t, std::size_t>> holes_by_bytes_;  // (bytes, offset)
  std::size_t used_bytes_ = 0;
  std::size_t peak_used_bytes_ = 0;
};

}  // namespace tessera::device
