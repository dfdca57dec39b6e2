#include "tessera/engine/memory_planning.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"
#include "tessera/engine/gather_host.h"
#include "tessera/engine/machine_limits.h"
#include "tessera/engine/mesh_groups.h"
#include "tessera/engine/tensor_memory.h"
#include "tessera/engine/update_rates.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/tier/scratch_file.h"

namespace tessera {
namespace {

using planner::MemoryPlanOptions;
using planner::RankMemory;

std::int64_t as_int(std::size_t bytes) {
  return static_cast<std::int64_t>(std::min(bytes, static_cast<std::size_t>(planner::kUnlimited)));
}

// As one rank sees it, for the others.
struct Found {
  std::uint64_t device_id = 0;
  std::int64_t host_bytes = 0;    // available to all ranks of the host; 0: cannot be read
  std::int64_t device_bytes = 0;  // free for all ranks of the device; 0: not discrete
  std::int32_t num_local_ranks = 1;
  HeldMemory held;
};

Found find_memory(Runtime& runtime, const HeldMemory& held) {
  Found found;
  found.held = held;
  found.num_local_ranks = runtime.num_local_ranks();
  found.host_bytes = as_int(device::read_host_memory().available_bytes());
  if (runtime.device().is_discrete()) {
    const device::MemoryInfo info = runtime.device().memory_info();
    if (info.shared_id != 0) {  // devices of two hosts may have one address
      const std::string host = device::read_host_id();
      found.device_id = comm::hash_bytes(host.data(), host.size(), info.shared_id);
    }
    found.device_bytes = as_int(info.free_bytes);
    if (runtime.on_cuda()) {
      const TorchMemory torch = torch_memory(runtime.cuda_device());
      found.held.device_bytes += torch.held_bytes - torch.taken_bytes;
    }
  }
  return found;
}

// What ranks of one place have taken is part of what they share.
planner::SharedMemory shared(std::int64_t free_bytes, std::int64_t held_bytes, int num_ranks) {
  return {free_bytes == 0 ? planner::kUnlimited : free_bytes + held_bytes * num_ranks, num_ranks};
}

// Collective.
RankMemory agree_on_memory(Runtime& runtime, comm::Group& group, const HeldMemory& held) {
  const std::vector<Found> all =
      engine::gather_host(group, find_memory(runtime, held), "memory of ranks");
  std::vector<RankMemory> ranks;
  for (const Found& each : all) {
    const auto num_sharing = std::count_if(all.begin(), all.end(), [&each](const Found& other) {
      return each.device_id != 0 && each.device_id == other.device_id;
    });
    RankMemory rank;
    rank.device = shared(each.device_bytes, each.held.device_bytes,
                         std::max(1, static_cast<int>(num_sharing)));
    rank.host = shared(each.host_bytes, each.held.host_bytes, each.num_local_ranks);
    ranks.push_back(rank);
  }
  return planner::least_memory(ranks);
}

std::int64_t num_elements(const planner::ModelShapes& model) {
  std::int64_t numel = 0;
  for (const planner::ParamShape& param : model.params) {
    numel += param.numel;
  }
  return numel;
}

// Collective, where rates have to be measured.
void choose_share(Runtime& runtime, comm::Group& group, const planner::ModelShapes& model,
                  std::int64_t tokens_per_backward, std::int64_t num_micro_batches,
                  MemoryPlanning& planning) {
  if (!runtime.on_cuda() || !planner::splits_update(planning.options)) {
    return;
  }
  planner::UpdateRates rates = runtime.update_rates(group, planning.memory.host.of_rank());
  if (tokens_per_backward > 0) {
    // Of a rank: it computes with whole parameters.
    const double seconds =
        expected_backward_s(runtime.cuda_device(), num_elements(model), tokens_per_backward);
    const std::vector<double> all = engine::gather_host(group, seconds, "time of a backward");
    rates.backward_s = *std::min_element(all.begin(), all.end());
  }
  planning.options.cpu_share =
      planner::choose_cpu_share(rates, model, planning.options, num_micro_batches);
  planning.rates = rates;
}

}  // namespace

bool asks_for_plan(const Config& config) {
  const auto is_limited = [&](const char* name) {
    return config.get_bytes(name) != kUnlimitedBytes;
  };
  return is_limited("memory.device") || is_limited("memory.host") || is_limited("memory.nvme") ||
         config.get_string("place.parameters") != "auto" ||
         config.get_string("place.optimizer") != "auto" || !config.get_list("nvme.paths").empty();
}

MemoryPlanning plan_memory(Runtime& runtime, comm::Group& group, const planner::ModelShapes& model,
                           const StepExpectations& step, const HeldMemory& held) {
  const Config& config = runtime.config();
  const std::int64_t num_micro_batches = config.get_int("batch.accumulate");
  MemoryPlanning planning;
  planning.mesh = engine::find_mesh(runtime, group);
  planning.asked = MemoryPlanOptions::from(config, planning.mesh, runtime.device().is_discrete());
  planning.asked.call_memory = group.call_memory();
  planning.asked.group_memory = group.held_memory();
  for (const std::string& directory : config.get_list("nvme.paths")) {
    tier::check_scratch_directory(directory);
  }
  // Before the exchange: no rank takes anything before all have looked.
  const auto limits = engine::MachineLimits::of_this_machine(config.get_list("nvme.paths"));
  planning.memory = agree_on_memory(runtime, group, held);
  planning.options = planning.asked;
  if (runtime.on_cuda()) {
    planning.tensor_bytes = torch_memory(runtime.cuda_device()).taken_bytes;
  }
  const auto found = planner::default_budgets(model, planning.asked, num_micro_batches, step.memory,
                                              planning.memory);
  if (found) {
    planning.options = found->options;
    planning.is_for_first_step = found->is_for_first_step;
    planning.note = found->text();
  } else if (!asks_for_plan(config)) {
    return planning;
  }
  choose_share(runtime, group, model, step.tokens_per_backward, num_micro_batches, planning);
  planning.plan = planner::plan_memory(model, planning.options, num_micro_batches);
  engine::check_fits(*planning.plan, limits, runtime.num_local_ranks());
  return planning;
}

MemoryPlanning refined(const MemoryPlanning& first, Runtime& runtime, comm::Group& group,
                       const planner::ModelShapes& model) {
  const std::int64_t num_micro_batches = runtime.config().get_int("batch.accumulate");
  const std::int64_t mine =
      runtime.on_cuda() ? torch_memory(runtime.cuda_device()).peak_bytes - first.tensor_bytes : 0;
  const std::vector<std::int64_t> all =
      engine::gather_host(group, mine, "activations of the first step");
  planner::StepMemory step;
  step.activation_bytes = std::max<std::int64_t>(0, *std::max_element(all.begin(), all.end()));
  MemoryPlanning planning = first;
  planning.is_for_first_step = false;
  const std::string measured = detail::concat(
      "activations took ", approximate_bytes(*step.activation_bytes), " in the first step");
  try {
    MemoryPlanOptions asked = first.asked;
    asked.has_nvme = false;  // host memory has held everything
    const auto found =
        planner::default_budgets(model, asked, num_micro_batches, step, first.memory);
    planning.options = found ? found->options : asked;
    if (first.rates && planner::splits_update(planning.options)) {
      planning.options.cpu_share =
          planner::choose_cpu_share(*first.rates, model, planning.options, num_micro_batches);
    }
    planning.plan = planner::plan_memory(model, planning.options, num_micro_batches);
    planning.note = detail::concat(
        measured,
        found ? "; placement is fixed: " + found->text()
              : std::string("; placement is fixed: everything is on the device from now on"));
  } catch (const ConfigError& error) {
    planning = first;
    planning.is_for_first_step = false;
    planning.note = detail::concat(
        measured, "; shards stay in host memory, another plan is not possible: ", error.what());
  }
  return planning;
}

}  // namespace tessera
