#include "tessera/planner/nvme_buffers.h"

#include <algorithm>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/shard/shard_store.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kLargestMasterBytes = std::int64_t{8} << 20;
constexpr std::int64_t kSmallestMasterBytes = std::int64_t{64} << 10;
constexpr int kOptimizerBuffers = 4;
// A backward of 0.3 s on a fast disk; pinned memory takes time to get.
constexpr std::int64_t kMostOptimizerBytes = std::int64_t{1} << 30;
constexpr std::int64_t kPartOfStates = 8;
constexpr std::int64_t kStep = shard::kShardStep;

// More in flight makes no disk faster.
constexpr std::int64_t kLargestParameterPoolBytes = std::int64_t{128} << 20;
constexpr std::int64_t kLargestGradientPoolBytes = std::int64_t{16} << 20;
// Beside a discrete device, units that are ahead are in its arena, too.
constexpr std::int64_t kUnitsReadAhead = 3;
constexpr std::int64_t kUnitsReadAheadDiscrete = 2;
constexpr int kParameterBuffers = 5;

}  // namespace

OptimizerBuffers::OptimizerBuffers(const CutModel& cut, const Placements& placements) : cut_(cut) {
  std::int64_t all_numel = 0;
  std::int64_t nvme_bytes = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (cut.is_trainable(i) && placements[i].updater == Updater::kCpu) {
      shards_.push_back({cut.layouts[i].shard_numel(), placements[i]});
      all_numel += cut.layouts[i].shard_numel();
      nvme_bytes += placements[i].states == Tier::kNvme ? cut.states_bytes(i) : 0;
    }
  }
  const std::int64_t limit_numel =
      std::min({cut.options.sub_group_bytes, kLargestMasterBytes, 4 * all_numel + 4 * kStep - 4}) /
      4 / kStep * kStep;
  largest_numel_ = std::max(kStep, limit_numel);
  smallest_numel_ = std::min(largest_numel_, kSmallestMasterBytes / 4);
  is_given_ = cut.options.optimizer_buffers > 0;
  num_wanted_ = is_given_ ? cut.options.optimizer_buffers : kOptimizerBuffers;
  // A host budget beside a device keeps states in memory even if they were asked to be on NVMe.
  const MemoryPlanOptions& options = cut.options;
  const bool is_short = options.is_discrete ? options.host_bytes != kUnlimited
                                            : options.memory_bytes() != kUnlimited &&
                                                  options.optimizer != Tier::kNvme;
  if (!is_given_ && !is_short) {
    deep_bytes_ = std::min(kMostOptimizerBytes, nvme_bytes / kPartOfStates);
  }
}

std::int64_t OptimizerBuffers::lease_bytes_of(const Shard& shard, std::int64_t numel) const {
  const auto if_on_nvme = [](Tier tier, std::int64_t bytes) {
    return tier == Tier::kNvme ? bytes : 0;
  };
  const std::int64_t fp32_bytes = block_bytes(4 * numel);
  return if_on_nvme(shard.placement.states, cut_.num_state_tensors() * fp32_bytes) +
         if_on_nvme(shard.placement.parameter,
                    block_bytes(numel * as_int(bytes_of(cut_.model.dtype)))) +
         if_on_nvme(shard.placement.gradient, fp32_bytes);
}

std::int64_t OptimizerBuffers::most_lease_bytes(std::int64_t sub_group_numel) const {
  struct Piece {
    std::int64_t numel;
    std::int64_t bytes;
  };
  std::vector<Piece> pieces;
  for (const Shard& shard : shards_) {
    for (std::int64_t begin = 0; begin < shard.numel; begin += sub_group_numel) {
      const std::int64_t numel = std::min(sub_group_numel, shard.numel - begin);
      pieces.push_back({numel, lease_bytes_of(shard, numel)});
    }
  }
  std::int64_t most = 0;
  std::int64_t numel = 0;
  std::int64_t bytes = 0;
  std::size_t first = 0;
  for (const Piece& piece : pieces) {
    numel += piece.numel;
    bytes += piece.bytes;
    for (; numel > sub_group_numel; ++first) {
      numel -= pieces[first].numel;
      bytes -= pieces[first].bytes;
    }
    most = std::max(most, bytes);
  }
  return most;
}

OptimizerBuffers::Choice OptimizerBuffers::make(std::int64_t sub_group_numel,
                                                int num_buffers) const {
  const std::int64_t lease_bytes = most_lease_bytes(sub_group_numel);
  return {sub_group_numel, lease_bytes > 0 ? num_buffers : 0, num_buffers * lease_bytes};
}

OptimizerBuffers::Choice OptimizerBuffers::smallest() const {
  return make(smallest_numel_, is_given_ ? num_wanted_ : 1);
}

OptimizerBuffers::Choice OptimizerBuffers::make_deep(std::int64_t bytes) const {
  const Choice one = make(largest_numel_, 1);
  const std::int64_t count =
      std::min(bytes, deep_bytes_) / std::max<std::int64_t>(taken_bytes(one.bytes), 1);
  return make(largest_numel_, std::max(num_wanted_, static_cast<int>(count)));
}

OptimizerBuffers::Choice OptimizerBuffers::largest() const { return make_deep(deep_bytes_); }

OptimizerBuffers::Choice OptimizerBuffers::choose(std::int64_t bytes) const {
  const Choice deep = make_deep(bytes);
  if (taken_bytes(deep.bytes) <= bytes) {
    return deep;
  }
  for (std::int64_t numel = largest_numel_; numel > smallest_numel_;
       numel = std::max(smallest_numel_, numel / 2 / kStep * kStep)) {
    const Choice choice = make(numel, num_wanted_);
    if (taken_bytes(choice.bytes) <= bytes) {
      return choice;
    }
  }
  for (int num_buffers = num_wanted_; num_buffers > 1 && !is_given_; --num_buffers) {
    const Choice choice = make(smallest_numel_, num_buffers);
    if (taken_bytes(choice.bytes) <= bytes) {
      return choice;
    }
  }
  return smallest();
}

std::int64_t ParameterBuffers::bytes_of(std::size_t id) const {
  return placements_[id].parameter == Tier::kNvme
             ? taken_bytes(block_bytes(as_int(cut_.layouts[id].shard_bytes())))
             : 0;
}

std::int64_t ParameterBuffers::smallest() const {
  std::int64_t all = 0;
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    all += bytes_of(i);
    largest = std::max(largest, bytes_of(i));
  }
  if (all == 0) {
    return as_int(coordinator::kSmallestLoaderBytes);  // the loader is there, and has nothing to do
  }
  if (!is_given()) {
    return kSmallestPoolBytes;
  }
  const MemoryPlanOptions& options = cut_.options;
  const std::int64_t count =
      options.parameter_buffers > 0 ? options.parameter_buffers : kParameterBuffers;
  const std::int64_t each = options.parameter_buffer_bytes > 0
                                ? block_bytes(options.parameter_buffer_bytes)
                                : std::min(largest, kLargestParameterPoolBytes / count);
  // Room for more than there is would be of no use.
  return std::max(kSmallestPoolBytes, each > all / count ? all : count * each);
}

std::int64_t ParameterBuffers::largest() const {
  const std::int64_t least = smallest();
  if (least < kSmallestPoolBytes || is_given()) {
    return least;
  }
  std::int64_t largest_unit = 0;
  for (const std::vector<int>& unit : cut_.model.units) {
    std::int64_t bytes = 0;
    for (const int id : unit) {
      bytes += bytes_of(static_cast<std::size_t>(id));
    }
    largest_unit = std::max(largest_unit, bytes);
  }
  const std::int64_t wanted = cut_.options.is_discrete ? kUnitsReadAheadDiscrete * largest_unit
                                                       : std::min(kUnitsReadAhead * largest_unit,
                                                                  kLargestParameterPoolBytes);
  return std::max(least, whole_pages_below(wanted));
}

std::int64_t largest_gradient_pool(const CutModel& cut) {
  std::int64_t all = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    all += cut.is_trainable(i) ? taken_bytes(block_bytes(4 * cut.layouts[i].shard_numel())) : 0;
  }
  return std::max(kSmallestPoolBytes, whole_pages_below(std::min(all, kLargestGradientPoolBytes)));
}

}  // namespace tessera::planner
