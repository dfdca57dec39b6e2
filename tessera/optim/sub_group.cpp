#include "tessera/optim/sub_group.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/io_engine.h"

namespace tessera::optim {
namespace {

std::size_t tensor_bytes(std::int64_t numel, DType dtype) {
  return tier::whole_blocks(static_cast<std::size_t>(numel) * bytes_of(dtype));
}

bool same_parts_on_nvme(const Placement& a, const Placement& b) {
  const auto differ = [](Tier one, Tier other) {
    return (one == Tier::kNvme) != (other == Tier::kNvme);
  };
  return !differ(a.parameter, b.parameter) && !differ(a.gradient, b.gradient) &&
         !differ(a.states, b.states);
}

class PlanMaker {
 public:
  PlanMaker(std::int64_t sub_group_numel, int num_states)
      : sub_group_numel_(sub_group_numel), num_states_(num_states) {}

  SubGroupPlan plan(const std::vector<SubGroupParam>& params) {
    plan_.states_bytes.resize(params.size(), 0);
    for (std::size_t id = 0; id < params.size(); ++id) {
      if (params[id].trainable) {
        add(static_cast<int>(id), params[id]);
      }
    }
    for (SubGroup& group : plan_.groups) {
      lay_out_lease(group);
      count(group, params);
    }
    return std::move(plan_);
  }

 private:
  void add(int id, const SubGroupParam& param) {
    const std::size_t num_tensors = num_state_tensors(param.dtype, num_states_);
    const auto index = static_cast<std::size_t>(id);
    if (param.placement.states == Tier::kNvme) {
      if (param.states_offset >= 0) {
        TESSERA_INVARIANT(param.states_offset % static_cast<std::int64_t>(tier::kBlockBytes) == 0,
                          "states of parameter ", id, " are at ", param.states_offset);
        states_end_ = static_cast<std::uint64_t>(param.states_offset);
      }
    }
    for (std::int64_t begin = 0; begin < param.shard_numel; begin += sub_group_numel_) {
      SubGroupPiece piece;
      piece.param = id;
      piece.begin = begin;
      piece.numel = std::min(sub_group_numel_, param.shard_numel - begin);
      piece.tensor_bytes = tensor_bytes(piece.numel, DType::kFloat32);
      piece.parameter_bytes = tensor_bytes(piece.numel, param.dtype);
      const std::size_t states_bytes = num_tensors * piece.tensor_bytes;
      plan_.states_bytes[index] += states_bytes;
      if (param.placement.states == Tier::kNvme) {
        piece.states_offset = states_end_;
        states_end_ += states_bytes;
        plan_.nvme_states_bytes += states_bytes;
      }
      put(piece, param, states_bytes);
    }
  }

  void put(const SubGroupPiece& piece, const SubGroupParam& param, std::size_t states_bytes) {
    if (!fits(piece, param)) {
      SubGroup& group = plan_.groups.emplace_back();
      group.placement = param.placement;
      group.states_offset = piece.states_offset;
    }
    SubGroup& group = plan_.groups.back();
    group.pieces.push_back(piece);
    group.numel += piece.numel;
    if (param.placement.states == Tier::kNvme) {
      group.states_bytes += states_bytes;
    }
  }

  // Into the last sub-group.
  bool fits(const SubGroupPiece& piece, const SubGroupParam& param) const {
    if (plan_.groups.empty()) {
      return false;
    }
    const SubGroup& last = plan_.groups.back();
    const bool states_follow = param.placement.states != Tier::kNvme ||
                               last.states_offset + last.states_bytes == piece.states_offset;
    return last.numel + piece.numel <= sub_group_numel_ &&
           same_parts_on_nvme(last.placement, param.placement) && states_follow;
  }

  void lay_out_lease(SubGroup& group) {
    std::size_t end = group.states_bytes;
    for (SubGroupPiece& piece : group.pieces) {
      if (group.states_on_nvme()) {
        piece.states_in_lease = static_cast<std::size_t>(piece.states_offset - group.states_offset);
      }
      if (group.parameters_on_nvme()) {
        piece.parameter_in_lease = end;
        end += piece.parameter_bytes;
      }
    }
    if (group.gradients_on_nvme()) {
      for (SubGroupPiece& piece : group.pieces) {
        piece.gradient_in_lease = end;
        end += piece.tensor_bytes;
      }
    }
    group.lease_bytes = end;
    plan_.max_lease_bytes = std::max(plan_.max_lease_bytes, end);
  }

  void count(const SubGroup& group, const std::vector<SubGroupParam>& params) {
    plan_.states_read_bytes += group.states_bytes;
    plan_.states_written_bytes += group.states_bytes;
    if (!group.parameters_on_nvme()) {
      return;
    }
    for (const SubGroupPiece& piece : group.pieces) {
      plan_.parameters_written_bytes += piece.parameter_bytes;
      if (is_own_master(params[static_cast<std::size_t>(piece.param)].dtype)) {
        plan_.parameters_read_bytes += piece.parameter_bytes;
      }
    }
  }

  const std::int64_t sub_group_numel_;
  const int num_states_;
  SubGroupPlan plan_;
  std::uint64_t states_end_ = 0;  // of what has been put so far
};

}  // namespace

SubGroupPlan plan_sub_groups(const std::vector<SubGroupParam>& params, std::int64_t sub_group_numel,
                             int num_states) {
  TESSERA_CHECK(sub_group_numel > 0 && sub_group_numel % shard::kShardStep == 0, ConfigError,
                "sub-groups of ", sub_group_numel, " elements; take a positive multiple of ",
                shard::kShardStep);
  return PlanMaker(sub_group_numel, num_states).plan(params);
}

std::size_t num_kept_groups(const SubGroupPlan& plan, std::size_t buffer_bytes) {
  std::size_t total = 0;
  for (const SubGroup& group : plan.groups) {
    total += group.lease_bytes;
  }
  if (total <= buffer_bytes) {
    return plan.groups.size();
  }
  const std::size_t for_others = std::max(3 * plan.max_lease_bytes, buffer_bytes / 2);
  std::size_t kept = 0;
  std::size_t end = 0;
  for (const SubGroup& group : plan.groups) {
    end += group.lease_bytes;
    if (end + for_others > buffer_bytes) {
      break;
    }
    ++kept;
  }
  return kept;
}

}  // namespace tessera::optim
