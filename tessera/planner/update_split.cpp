#include "tessera/planner/update_split.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/optim/sub_group.h"
#include "tessera/planner/memory_cost.h"
#include "tessera/planner/memory_planner.h"

namespace tessera::planner {
namespace {

// Elements with states in host memory, as they are given out.
class Split {
 public:
  explicit Split(double share) : share_(share) {}

  bool goes_to_cpu(std::int64_t numel) const {
    if (share_ >= 1 || share_ <= 0) {
      return share_ >= 1;
    }
    const std::int64_t all = num_all_ + numel;
    return num_all_ > 0 && distance(num_cpu_ + numel, all) < distance(num_cpu_, all);
  }
  void give(std::int64_t numel, bool to_cpu) {
    num_all_ += numel;
    num_cpu_ += to_cpu ? numel : 0;
  }
  // Its side has too much, by all of it at least.
  bool changes_sides(std::int64_t numel, bool from_cpu) const {
    const double excess = static_cast<double>(num_cpu_) - share_ * static_cast<double>(num_all_);
    return numel > 0 && static_cast<double>(numel) <= (from_cpu ? excess : -excess);
  }
  void move(std::int64_t numel, bool to_cpu) { num_cpu_ += to_cpu ? numel : -numel; }

 private:
  double distance(std::int64_t num_cpu, std::int64_t num_all) const {
    return std::abs(static_cast<double>(num_cpu) - share_ * static_cast<double>(num_all));
  }

  const double share_;
  std::int64_t num_all_ = 0;
  std::int64_t num_cpu_ = 0;
};

// What a step's update has to move, in bytes per element of the states in host memory.
class UpdateTimes {
 public:
  UpdateTimes(const UpdateRates& rates, const ModelShapes& model, const MemoryPlan& plan,
              const MemoryPlanOptions& options, std::int64_t num_micro_batches)
      : rates_(rates) {
    const bool is_own_master = optim::is_own_master(model.dtype);
    const auto parameter = static_cast<double>(bytes_of(model.dtype));
    states_ = 4 * static_cast<double>(optim::num_state_tensors(model.dtype, options.num_states));
    // Gradients of several micro-batches are on the host whoever updates with them.
    const double gradient =
        num_micro_batches == 1 ? parameter
        : plan.accumulation.host_sums > plan.accumulation.host_copies
            ? sizeof(float)
            : static_cast<double>(grad::host_addends_bytes(
                  options.sends_gradients() ? options.wire_dtype : model.dtype, num_micro_batches));
    gradient_to_device_ = num_micro_batches == 1 ? 0 : gradient;
    // Each is read and written but for the gradient, which is read; a parameter that is not its own
    // master is only written.
    touched_ = 2 * states_ + gradient + (is_own_master ? 2 : 1) * parameter;
    stays_on_device_ = plan.updates_in_place;
    double in_host = 0;
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const Placement& each = plan.params[i];
      if (model.params[i].trainable && each.states == Tier::kHost) {
        // Of this rank, up to what does not divide.
        const double numel = static_cast<double>(model.params[i].numel) / options.num_ranks;
        numel_ += numel;
        in_host += each.parameter == Tier::kDevice ? 0 : numel;
      }
    }
    parameters_in_host_ = numel_ > 0 ? parameter * in_host / numel_ : 0;
    parameters_on_device_ = parameter - parameters_in_host_;
    slots_numel_ = static_cast<double>(plan.num_update_slots) *
                   static_cast<double>(plan.update_slot_bytes) / (states_ + parameter);
  }

  double numel() const { return numel_; }
  // What has to wait for the CPU, or for memory that all of it passes.
  double cpu_s(double share) const {
    const double bytes = touched_ * share * numel_;
    const double own_s = bytes / rates_.cpu_bytes_per_s;
    return rates_.host_bytes_per_s == 0
               ? own_s
               : std::max(own_s,
                          (bytes + h2d_bytes(share) + d2h_bytes(share)) / rates_.host_bytes_per_s);
  }
  double link_s(double share) const {
    return std::max(h2d_bytes(share) / rates_.h2d_bytes_per_s,
                    d2h_bytes(share) / rates_.d2h_bytes_per_s);
  }

 private:
  // From the end of backward on: states, gradients of several micro-batches, and new values of the
  // CPU's parameters. Where a parameter is its own master, or gradients are not of its type, the
  // device's are copied again, too.
  double h2d_bytes(double share) const {
    const double streamed = (1 - share) * numel_;
    double ahead = states_ * std::min(slots_numel_, streamed);
    if (rates_.backward_s > 0) {
      const double rate = std::max(rates_.h2d_alone_bytes_per_s, rates_.h2d_bytes_per_s);
      // The norm waits for the host, which adds up several micro-batches' gradients meanwhile.
      const double norm_s = gradient_to_device_ * numel_ / rates_.cpu_bytes_per_s;
      ahead = std::min(states_ * streamed, std::max(rates_.backward_s, norm_s) * rate);
    }
    const double brought = stays_on_device_ ? share * numel_ : numel_;
    const double bytes = (states_ + gradient_to_device_) * streamed +
                         parameters_in_host_ * brought + parameters_on_device_ * share * numel_;
    return std::max(0.0, bytes - ahead);
  }
  // The last slots are copied while the next backward runs.
  double d2h_bytes(double share) const {
    const double streamed = (1 - share) * numel_;
    return (states_ + parameters_in_host_) * std::max(0.0, streamed - slots_numel_);
  }

  const UpdateRates& rates_;
  double numel_ = 0;
  double states_ = 0;
  double touched_ = 0;
  double gradient_to_device_ = 0;
  double parameters_in_host_ = 0;
  double parameters_on_device_ = 0;
  double slots_numel_ = 0;
  bool stays_on_device_ = false;
};

}  // namespace

double wished_cpu_share(const MemoryPlanOptions& options) {
  return options.cpu_share < 0 ? kDefaultCpuShare : options.cpu_share;
}

double assign_updates(const CutModel& cut, const UpdateWish& wish, Placements& placements) {
  Split split(wish.cpu_share);
  // Includes shards that the CPU updates because their parameter is on NVMe.
  std::int64_t num_host = 0;
  std::int64_t num_cpu = 0;
  std::vector<std::size_t> split_ids;  // whom either could update
  for (std::size_t i = 0; i < placements.size(); ++i) {
    Placement& each = placements[i];
    const std::int64_t numel = cut.layouts[i].shard_numel();
    // A frozen one too, which may be unfrozen.
    bool to_cpu =
        each.parameter == Tier::kNvme || (cut.is_trainable(i) && each.states != Tier::kDevice);
    if (to_cpu && cut.is_trainable(i) && each.states == Tier::kHost) {
      if (each.parameter != Tier::kNvme && each.gradient != Tier::kNvme) {
        to_cpu = split.goes_to_cpu(numel);
        split.give(numel, to_cpu);
        split_ids.push_back(i);
      }
      num_host += numel;
      num_cpu += to_cpu ? numel : 0;
    }
    each.updater = to_cpu ? Updater::kCpu : Updater::kDevice;
  }
  // A large shard at the end, as a head is, leaves the share far off: smaller ones before it change
  // sides.
  for (auto id = split_ids.rbegin(); id != split_ids.rend(); ++id) {
    Updater& updater = placements[*id].updater;
    const std::int64_t numel = cut.layouts[*id].shard_numel();
    const bool from_cpu = updater == Updater::kCpu;
    if (split.changes_sides(numel, from_cpu)) {
      updater = from_cpu ? Updater::kDevice : Updater::kCpu;
      split.move(numel, !from_cpu);
      num_cpu += from_cpu ? -numel : numel;
    }
  }
  for (Placement& each : placements) {
    const bool stays = each.updater == Updater::kDevice &&
                       (wish.num_micro_batches == 1 || each.states == Tier::kDevice);
    const bool on_nvme = each.gradient == Tier::kNvme && each.updater == Updater::kCpu;
    each.gradient = stays ? Tier::kDevice : on_nvme ? Tier::kNvme : Tier::kHost;
  }
  return num_host == 0 ? 0 : static_cast<double>(num_cpu) / static_cast<double>(num_host);
}

bool splits_update(const MemoryPlanOptions& options) {
  const bool may_be_in_host =
      options.optimizer == Tier::kHost ||
      (!options.optimizer && options.device_bytes != kUnlimited) ||
      (options.optimizer == Tier::kNvme && options.host_bytes != kUnlimited);
  return options.is_discrete && options.cpu_share < 0 && may_be_in_host;
}

double choose_cpu_share(const UpdateRates& rates, const ModelShapes& model,
                        const MemoryPlanOptions& options, std::int64_t num_micro_batches) {
  TESSERA_INVARIANT(rates.cpu_bytes_per_s > 0 && rates.h2d_bytes_per_s > 0 &&
                        rates.d2h_bytes_per_s > 0 && rates.backward_s >= 0,
                    "rates of ", rates.cpu_bytes_per_s, ", ", rates.h2d_bytes_per_s, " and ",
                    rates.d2h_bytes_per_s, " bytes per second, backward of ", rates.backward_s,
                    " s");
  MemoryPlanOptions split_options = options;
  split_options.cpu_share = -1;
  const MemoryPlan plan = plan_memory(model, split_options, num_micro_batches);
  const UpdateTimes times(rates, model, plan, options, num_micro_batches);
  if (times.numel() == 0) {
    return 0;
  }
  const auto device_ends_later = [&times](double share) {
    return times.link_s(share) > times.cpu_s(share);
  };
  if (device_ends_later(1)) {
    return 1;
  }
  // The CPU takes longer with a larger share, the device shorter.
  double low = 0;
  double high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (device_ends_later(middle) ? low : high) = middle;
  }
  return (low + high) / 2;
}

}  // namespace tessera::planner
