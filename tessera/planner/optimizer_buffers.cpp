#include "tessera/planner/optimizer_buffers.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/shard/shard_store.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kLargestMasterBytes = std::int64_t{8} << 20;
constexpr std::int64_t kSmallestMasterBytes = std::int64_t{64} << 10;
constexpr int kNumBuffers = 4;
constexpr std::int64_t kStep = shard::kShardStep;

}  // namespace

OptimizerBuffers::OptimizerBuffers(const CutModel& cut, const std::vector<ShardPlaces>& stored)
    : cut_(cut) {
  std::int64_t all_numel = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (cut.is_trainable(i)) {
      shards_.push_back({cut.layouts[i].shard_numel(), stored[i].parameter == Place::kNvme,
                         stored[i].gradient == Place::kNvme, stored[i].states == Place::kNvme});
      all_numel += cut.layouts[i].shard_numel();
    }
  }
  const std::int64_t limit_numel =
      std::min({cut.options.sub_group_bytes, kLargestMasterBytes, 4 * all_numel + 4 * kStep - 4}) /
      4 / kStep * kStep;
  largest_numel_ = std::max(kStep, limit_numel);
  smallest_numel_ = std::min(largest_numel_, kSmallestMasterBytes / 4);
  is_given_ = cut.options.optimizer_buffers > 0;
  num_wanted_ = is_given_ ? cut.options.optimizer_buffers : kNumBuffers;
}

std::int64_t OptimizerBuffers::lease_bytes_of(const Shard& shard, std::int64_t numel) const {
  const DType dtype = cut_.model.dtype;
  const auto num_tensors =
      static_cast<std::int64_t>(optim::num_state_tensors(dtype, cut_.options.num_states));
  return (shard.states_stored ? num_tensors * block_bytes(4 * numel) : 0) +
         (shard.parameter_stored ? block_bytes(numel * static_cast<std::int64_t>(bytes_of(dtype)))
                                 : 0) +
         (shard.gradient_stored ? block_bytes(4 * numel) : 0);
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

OptimizerBuffers::Choice OptimizerBuffers::largest() const {
  return make(largest_numel_, num_wanted_);
}

OptimizerBuffers::Choice OptimizerBuffers::choose(std::int64_t bytes) const {
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

}  // namespace tessera::planner
