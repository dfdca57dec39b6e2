#include "tessera/planner/parameter_buffers.h"

#include <algorithm>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/device/host_memory.h"
#include "tessera/tier/io_engine.h"

namespace tessera::planner {
namespace {

// More in flight makes no disk faster.
constexpr std::int64_t kLargestPoolBytes = std::int64_t{128} << 20;
constexpr std::int64_t kUnitsReadAhead = 3;
constexpr int kDefaultBuffers = 5;

}  // namespace

std::int64_t parameter_weight(const shard::Layout& layout) {
  return taken_bytes(block_bytes(static_cast<std::int64_t>(layout.shard_bytes())));
}

std::int64_t whole_pages_below(std::int64_t bytes) {
  const auto step = static_cast<std::int64_t>(std::max(device::page_bytes(), tier::kBlockBytes));
  return bytes / step * step;
}

std::int64_t ParameterBuffers::smallest() const {
  std::int64_t all = 0;
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < stored_.size(); ++i) {
    if (stored_[i].parameter == Place::kNvme) {
      const std::int64_t weight = parameter_weight(cut_.layouts[i]);
      all += weight;
      largest = std::max(largest, weight);
    }
  }
  if (all == 0) {
    return static_cast<std::int64_t>(coordinator::kSmallestLoaderBytes);
  }
  if (!is_given()) {
    return kSmallestPoolBytes;
  }
  const PlacementOptions& options = cut_.options;
  const std::int64_t count =
      options.parameter_buffers > 0 ? options.parameter_buffers : kDefaultBuffers;
  const std::int64_t each = options.parameter_buffer_bytes > 0
                                ? block_bytes(options.parameter_buffer_bytes)
                                : std::min(largest, kLargestPoolBytes / count);
  // Room for more than there is would be of no use.
  return std::max(kSmallestPoolBytes, each > all / count ? all : count * each);
}

std::int64_t ParameterBuffers::largest() const {
  const std::int64_t least = smallest();
  if (least < kSmallestPoolBytes || is_given()) {
    return least;
  }
  return std::max(least, whole_pages_below(
                             std::min(kUnitsReadAhead * largest_stored_unit(), kLargestPoolBytes)));
}

std::int64_t ParameterBuffers::largest_stored_unit() const {
  std::int64_t largest = 0;
  for (const std::vector<int>& unit : cut_.model.units) {
    std::int64_t bytes = 0;
    for (const int id : unit) {
      const auto i = static_cast<std::size_t>(id);
      bytes += stored_[i].parameter == Place::kNvme ? parameter_weight(cut_.layouts[i]) : 0;
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace tessera::planner
