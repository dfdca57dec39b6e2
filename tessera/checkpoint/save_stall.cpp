#include "tessera/checkpoint/save_stall.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::checkpoint {

void SaveBytes::add(std::uint64_t bytes, bool is_changed_by_updates) {
  if (stretches_.empty() || stretches_.back().is_changed_by_updates != is_changed_by_updates) {
    stretches_.push_back({0, is_changed_by_updates});
  }
  stretches_.back().bytes += bytes;
  total_ += bytes;
  changing_ += is_changed_by_updates ? bytes : 0;
}

std::uint64_t SaveBytes::changing_in_first(std::uint64_t bytes) const {
  std::uint64_t changing = 0;
  for (const Stretch& stretch : stretches_) {
    const std::uint64_t part = std::min(bytes, stretch.bytes);
    changing += stretch.is_changed_by_updates ? part : 0;
    bytes -= part;
  }
  return changing;
}

double predicted_stall_s(const SaveBytes& save, const SavePace& pace) {
  TESSERA_INVARIANT(pace.bytes_per_s > 0, "a stall at ", pace.bytes_per_s, " bytes per second");
  const double written =
      static_cast<double>(pace.written_bytes) + pace.bytes_per_s * pace.before_update_s;
  const auto whole = static_cast<double>(save.total());
  const std::uint64_t changing_written =
      save.changing_in_first(static_cast<std::uint64_t>(std::min(written, whole)));
  const auto left = static_cast<double>(save.changing() - changing_written);
  return std::max(left - static_cast<double>(pace.buffer_bytes), 0.0) / pace.bytes_per_s;
}

}  // namespace tessera::checkpoint
