#include "tessera/planner/cuda_cost.h"

#include <algorithm>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/device/arena_map.h"
#include "tessera/device/host_memory.h"
#include "tessera/grad/reducer.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/shard/shard_store.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kSlotAlignment = 256;
constexpr std::int64_t kKeptGradientsPerBudget = 16;

std::int64_t rounded_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

bool is_streamed(const ShardPlaces& places) {
  return places.device_update && places.states == Place::kHost;
}

std::int64_t full_gradient_bytes(const CutModel& cut, std::size_t id) {
  return cut.is_trainable(id) ? cut.layouts[id].numel() * as_int(bytes_of(cut.model.dtype)) : 0;
}

// Something of it comes to the device for its update, or leaves after it.
bool needs_slot(const ShardPlaces& places) {
  return places.device_update &&
         (places.states == Place::kHost || places.parameter == Place::kHost);
}

}  // namespace

std::int64_t pinned_bytes(std::int64_t bytes) {
  return rounded_up(bytes, as_int(device::page_bytes()));
}

std::int64_t pinned_feed_bytes(std::int64_t pool_bytes) {
  if (pool_bytes == 0) {
    return 0;
  }
  const coordinator::LoaderSizes sizes =
      coordinator::loader_sizes(static_cast<std::size_t>(pool_bytes));
  return pinned_bytes(block_bytes(as_int(2 * sizes.tile_bytes))) +
         pinned_bytes(block_bytes(as_int(sizes.window_bytes)));
}

ModelShapes processor_model(const ModelShapes& model, const std::vector<ShardPlaces>& places) {
  ModelShapes processor = model;
  for (std::size_t i = 0; i < places.size(); ++i) {
    processor.params[i].trainable = model.params[i].trainable && !places[i].device_update;
  }
  return processor;
}

std::int64_t most_kept_gradients(const CutModel& cut) {
  std::int64_t largest = 0;
  std::int64_t all = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    const std::int64_t bytes = full_gradient_bytes(cut, i);
    largest = std::max(largest, bytes);
    all += bytes;
  }
  const std::int64_t wanted =
      std::min(grad::kMostKeptBytes, cut.options.device_bytes / kKeptGradientsPerBudget);
  return std::min(all, std::max(wanted, largest));
}

CudaCost::CudaCost(const CutModel& cut, std::int64_t num_micro_batches)
    : cut_(cut),
      num_micro_batches_(num_micro_batches),
      gradients_leave_early_(cut.options.num_ranks == 1 && num_micro_batches == 1),
      bucket_bytes_(choose_bucket_bytes(cut)),
      num_state_tensors_(
          as_int(optim::num_state_tensors(cut.model.dtype, cut.options.num_states))) {
  if (cut.options.num_ranks > 1) {
    // Gradients are never stored, so this does not depend on places.
    reductions_ = gradient_cost(cut, std::vector<ShardPlaces>(cut.num_params()), bucket_bytes_);
  }
}

bool CudaCost::is_small(std::size_t id) const {
  return as_int(cut_.layouts[id].full_bytes()) <= kSmallParamBytes;
}

std::int64_t CudaCost::gradient_bytes_per_element() const {
  return gradients_leave_early_ ? as_int(bytes_of(cut_.model.dtype)) : as_int(sizeof(float));
}

std::int64_t CudaCost::kept_gradients(const std::vector<ShardPlaces>& places) const {
  if (cut_.options.num_ranks > 1) {
    return 0;  // buckets have their own bounds
  }
  std::int64_t read = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const bool is_adopted = gradients_leave_early_ && places[i].device_update;
    read += is_adopted ? 0 : full_gradient_bytes(cut_, i);
  }
  return std::min(read, most_kept_gradients(cut_));
}

bool CudaCost::stays_on_device_once(std::size_t id, const ShardPlaces& places) const {
  return places.parameter == Place::kHost && places.device_update && cut_.is_trainable(id) &&
         gradients_leave_early_ && !optim::is_own_master(cut_.model.dtype);
}

Lines CudaCost::shard_lines(const std::vector<ShardPlaces>& places) const {
  const bool is_alone = cut_.options.num_ranks == 1;
  Lines lines;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const shard::Layout& layout = cut_.layouts[i];
    const ShardPlaces& each = places[i];
    const std::int64_t shard_bytes = as_int(layout.shard_bytes());
    switch (each.parameter) {
      case Place::kDevice:
        lines.add(Tier::kDevice, Role::kShard, shard_bytes);
        break;
      case Place::kHost:
        lines.add(Tier::kPinned, Role::kShard, pinned_bytes(shard_bytes));
        break;
      case Place::kNvme:
        lines.add(Tier::kNvme, Role::kShard, block_bytes(shard_bytes));
        break;
    }
    if (!cut_.is_trainable(i)) {
      continue;
    }
    if (is_alone && (each.device_update || !gradients_leave_early_)) {
      lines.add(Tier::kDevice, Role::kGradient, layout.numel() * gradient_bytes_per_element());
    }
    if (!each.device_update) {
      lines.add(Tier::kPinned, Role::kGradient,
                pinned_bytes(layout.shard_numel() * gradient_bytes_per_element()));
      if (each.parameter == Place::kDevice) {
        // New values on their way up.
        lines.add(Tier::kPinned, Role::kStaging, pinned_bytes(shard_bytes));
      }
    }
    const std::int64_t states_bytes = num_state_tensors_ * block_bytes(4 * layout.shard_numel());
    switch (each.states) {
      case Place::kDevice:
        lines.add(Tier::kDevice, Role::kOptimizer, states_bytes);
        break;
      case Place::kHost:
        if (each.device_update) {
          lines.add(Tier::kPinned, Role::kOptimizer, pinned_bytes(states_bytes));
        } else {
          lines.add(Tier::kHost, Role::kOptimizer, taken_bytes(states_bytes));
        }
        break;
      case Place::kNvme:
        lines.add(Tier::kNvme, Role::kOptimizer, states_bytes);
        break;
    }
  }
  lines.add(Tier::kDevice, Role::kGradient,
            is_alone ? 0 : reductions_.bytes.shards + reductions_.bytes.slots);
  return lines;
}

SlotNeed CudaCost::slot_need(const std::vector<ShardPlaces>& places,
                             std::int64_t slot_numel) const {
  SlotNeed need;
  std::int64_t largest_numel = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::int64_t numel = cut_.layouts[i].shard_numel();
    if (cut_.is_trainable(i) && needs_slot(places[i])) {
      largest_numel = std::max(largest_numel, numel);
      need.num_sub_groups += (numel + slot_numel - 1) / slot_numel;
    }
  }
  // New values, or the parameter that is its own master.
  const std::int64_t parameter_bytes = as_int(bytes_of(cut_.model.dtype));
  const std::int64_t numel = std::min(slot_numel, rounded_up(largest_numel, shard::kShardStep));
  need.slot_bytes = rounded_up(numel * (4 * num_state_tensors_ + parameter_bytes), kSlotAlignment);
  return need;
}

std::int64_t CudaCost::most_comm_bytes() const {
  return cut_.options.num_ranks == 1
             ? 0
             : reductions_.staging + GatherCost(cut_, bucket_bytes_).staging_bytes(kUnlimited);
}

std::int64_t CudaCost::gathered_bytes(const std::vector<ShardPlaces>& places) const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    bytes += is_gathered(cut_, places[i])
                 ? as_int(device::round_to_arena(cut_.layouts[i].full_bytes()))
                 : 0;
  }
  return bytes;
}

optim::SubGroupPlan CudaCost::processor_groups(const std::vector<ShardPlaces>& places,
                                               std::int64_t sub_group_numel) const {
  const ModelShapes model = processor_model(cut_.model, places);
  return sub_groups(CutModel(model, cut_.options), places, sub_group_numel);
}

void CudaCost::complete(Placement& placement) const {
  const std::vector<ShardPlaces>& places = placement.params;
  placement.uses_nvme = uses_nvme(places);
  placement.gradients_leave_early = gradients_leave_early_;
  placement.bucket_bytes = bucket_bytes_;
  Lines lines = shard_lines(places);
  lines.add(Tier::kDevice, Role::kFull, placement.arena_bytes);
  lines.add(Tier::kDevice, Role::kStaging,
            placement.num_update_slots * placement.update_slot_bytes);
  lines.add(Tier::kPinned, Role::kStaging,
            pinned_bytes(block_bytes(placement.optimizer_pool_bytes)));
  lines.add(Tier::kPinned, Role::kStaging, pinned_feed_bytes(placement.parameter_pool_bytes));
  if (cut_.options.verify) {
    lines.add(Tier::kHost, Role::kOther, checksum_bytes(lines.bytes(Tier::kNvme)));
  }
  placement.ledger = lines.take();
  placement.gather_staging_bytes =
      GatherCost(cut_, bucket_bytes_).staging_bytes(placement.arena_bytes);
  placement.reduction_staging_bytes = reductions_.staging;
  placement.comm_bytes = placement.gather_staging_bytes + placement.reduction_staging_bytes;
  placement.kept_gradient_bytes = kept_gradients(places);
  placement.full_gradient_bytes = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    placement.full_gradient_bytes =
        std::max(placement.full_gradient_bytes, full_gradient_bytes(cut_, i));
  }
  placement.full_gradient_bytes += placement.kept_gradient_bytes;
  count_step(processor_groups(places, placement.sub_group_numel),
             placement.live_limit_bytes >= gathered_bytes(places), placement);
}

void CudaCost::count_step(const optim::SubGroupPlan& plan, bool holds_all,
                          Placement& placement) const {
  const std::vector<ShardPlaces>& places = placement.params;
  StepBytes& step = placement.step;
  step = {};
  step.parameters_from_update =
      parameters_from_update(cut_, places, placement.parameter_pool_bytes);
  step.states_read = as_int(plan.states_read_bytes + plan.parameters_read_bytes);
  step.states_written = as_int(plan.states_written_bytes);
  (cut_.model.dtype == DType::kFloat32 ? step.states_written : step.parameters_written) +=
      as_int(plan.parameters_written_bytes);
  LinkBytes& link = placement.link;
  link = {};
  UpdateNumel& update = placement.update;
  update = {};
  for (std::size_t i = 0; i < places.size(); ++i) {
    const shard::Layout& layout = cut_.layouts[i];
    const ShardPlaces& each = places[i];
    const std::int64_t shard_bytes = as_int(layout.shard_bytes());
    if (holds_all && each.parameter != Place::kDevice) {
      link.h2d += stays_on_device_once(i, each) ? 0 : shard_bytes;
      step.parameters_read += each.parameter == Place::kNvme ? block_bytes(shard_bytes) : 0;
    }
    if (!cut_.is_trainable(i)) {
      continue;
    }
    (is_streamed(each)    ? update.streamed
     : each.device_update ? update.resident
                          : update.processor) += layout.shard_numel();
    if (is_streamed(each)) {
      const std::int64_t states_bytes =
          4 * num_state_tensors_ * rounded_up(layout.shard_numel(), optim::kStreamedStep);
      const bool brings_master =
          optim::is_own_master(layout.dtype()) && each.parameter != Place::kDevice;
      link.h2d += states_bytes + (brings_master ? shard_bytes : 0);
      link.d2h += states_bytes;
    }
    if (each.device_update) {
      link.d2h += each.parameter == Place::kDevice ? 0 : shard_bytes;
      step.parameters_written += each.parameter == Place::kNvme ? block_bytes(shard_bytes) : 0;
    } else {
      link.d2h += layout.shard_numel() * gradient_bytes_per_element();
      link.h2d += each.parameter == Place::kDevice ? shard_bytes : 0;
    }
  }
  if (holds_all) {
    return;
  }
  // As often as units need them, in forward and in backward.
  step.parameters_read = num_micro_batches_ * stored_parameter_uses(cut_, places);
  for (const std::vector<int>& unit : cut_.model.units) {
    for (const int id : unit) {
      const auto i = static_cast<std::size_t>(id);
      if (places[i].parameter != Place::kDevice) {
        const std::int64_t num_uses =
            2 * num_micro_batches_ - (stays_on_device_once(i, places[i]) ? 1 : 0);
        link.h2d += num_uses * as_int(cut_.layouts[i].shard_bytes());
      }
    }
  }
}

}  // namespace tessera::planner
