#include "cli/train_memory.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <vector>

#include "cli/prediction.h"
#include "cli/train_measure.h"
#include "cli/train_plan.h"
#include "models/gpt_activations.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"
#include "tessera/engine/machine_limits.h"
#include "tessera/engine/memory_planning.h"
#include "tessera/optim/rule.h"
#include "tessera/planner/memory_budgets.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/tier/io_measure.h"
#include "tessera/tier/scratch_file.h"

namespace tessera::cli {
namespace {

// One of each device: directories of one disk share its rates.
std::vector<std::string> disks_of(const std::vector<std::string>& directories) {
  std::set<dev_t> devices;
  std::vector<std::string> disks;
  for (const std::string& directory : directories) {
    struct stat status {};
    if (::stat(directory.c_str(), &status) == 0 && devices.insert(status.st_dev).second) {
      disks.push_back(directory);
    }
  }
  return disks;
}

// As the engine measures, so that either finds what the other has kept.
tier::MeasureOptions measure_options(const Config& config) {
  const std::string& kind = config.get_string("nvme.engine");
  const std::string& direct = config.get_string("nvme.direct_io");
  tier::MeasureOptions options;
  options.kind = kind == "uring"     ? tier::IoKind::kUring
                 : kind == "threads" ? tier::IoKind::kThreads
                                     : tier::IoKind::kAuto;
  options.direct = direct == "on"    ? tier::DirectIo::kOn
                   : direct == "off" ? tier::DirectIo::kOff
                                     : tier::DirectIo::kAuto;
  return options;
}

// Striped, so the slowest disk sets the pace of all.
void add_disks(const std::vector<tier::DiskRates>& disks, StepRates& rates) {
  bool is_first = true;
  for (const tier::DiskRates& measured : disks) {
    const double mixed = measured.mixed_read_bytes_per_s + measured.mixed_write_bytes_per_s;
    const auto keep_slowest = [is_first](double& rate, double other) {
      rate = is_first ? other : std::min(rate, other);
    };
    keep_slowest(rates.read_bytes_per_s, measured.read_bytes_per_s);
    keep_slowest(rates.write_bytes_per_s, measured.write_bytes_per_s);
    keep_slowest(rates.mixed_bytes_per_s, mixed);
    is_first = false;
  }
  const auto num_disks = static_cast<double>(disks.size());
  rates.read_bytes_per_s *= num_disks;
  rates.write_bytes_per_s *= num_disks;
  rates.mixed_bytes_per_s *= num_disks;
}

// `notes`: a line for each that was not measured.
void measure_disks(const Config& config, StepRates& rates, std::string& notes) {
  std::vector<tier::DiskRates> disks;
  for (const std::string& disk : disks_of(config.get_list("nvme.paths"))) {
    disks.push_back(tier::measure_directory(disk, measure_options(config)));
    notes += disks.back().assumed.empty() ? "" : disks.back().assumed + "\n";
  }
  add_disks(disks, rates);
}

std::string disk_bound_text(const planner::MemoryPlan& placement, const StepRates& rates) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "the disk takes at least %.2f s per step\n",
                predict_step(placement, rates).io_s);
  return text.data();
}

// What belongs together in other units than those of the shapes is known once they are made.
bool has_final_units(const Config& config) {
  const auto is_empty = [&config](const char* option) { return config.get_list(option).empty(); };
  return is_empty("unit.leaf_types") && is_empty("unit.leaf_names") &&
         is_empty("unit.leaf_name_suffixes") && is_empty("unit.dynamic_names") &&
         config.get_int("unit.leaf_below_numel") == 0;
}

// Shapes, options and plan are there: what follows from them.
void complete(const Config& config, const models::GptOptions& model, int num_ranks,
              TrainMemory& memory) {
  const BatchShape batch{config.get_int("batch.total"), num_ranks,
                         config.get_int("batch.accumulate")};
  const optim::RuleOptions rule = optim::RuleOptions::from(config);
  for (const std::string_view name : optim::state_names(rule)) {
    memory.state_names.emplace_back(name);
  }
  memory.activations = models::gpt_activations(model, batch.per_micro_batch());
  if (memory.plan.is_discrete) {
    memory.device_peak_bytes =
        device_peak_bytes(memory.shapes, memory.plan, model, batch.per_micro_batch());
  }
}

StepExpectations expectations(const TrainPlan& plan, const planner::ModelShapes& shapes) {
  const std::int64_t batch = plan.batch.per_micro_batch();
  StepExpectations step;
  step.memory.activation_bytes = models::gpt_activations(plan.model, batch).peak;
  step.memory.device_peak_bytes = [shapes, model = plan.model,
                                   batch](const planner::MemoryPlan& planned) {
    return device_peak_bytes(shapes, planned, model, batch);
  };
  step.tokens_per_backward = batch * plan.model.sequence;
  return step;
}

}  // namespace

TrainMemory make_memory_plan(const Config& config, const models::GptOptions& model,
                             const comm::Mesh& mesh, bool on_cuda) {
  TrainMemory memory;
  memory.shapes = models::planner_shapes(models::gpt_shape(model));
  memory.options = planner::MemoryPlanOptions::from(config, mesh, on_cuda);
  memory.plan =
      planner::plan_memory(memory.shapes, memory.options, config.get_int("batch.accumulate"));
  complete(config, model, mesh.num_ranks(), memory);
  return memory;
}

std::optional<TrainMemory> plan_memory(const Config& config, const models::GptOptions& model,
                                       const comm::Mesh& mesh, bool on_cuda) {
  return asks_for_plan(config)
             ? std::optional<TrainMemory>(make_memory_plan(config, model, mesh, on_cuda))
             : std::nullopt;
}

void check_machine(const TrainPlan& plan, int num_local_ranks) {
  if (plan.unsharded || !has_final_units(plan.config)) {
    return;
  }
  const std::vector<std::string>& directories = plan.config.get_list("nvme.paths");
  for (const std::string& directory : directories) {
    tier::check_scratch_directory(directory);
  }
  planner::RankMemory memory;
  memory.host.num_ranks = num_local_ranks;
  if (const std::size_t bytes = device::read_host_memory().available_bytes(); bytes > 0) {
    memory.host.free_bytes = static_cast<std::int64_t>(bytes);
  }
  if (plan.memory) {
    engine::check_fits(plan.memory->plan, engine::MachineLimits::of_this_machine(directories),
                       num_local_ranks);
  }
  const planner::ModelShapes shapes = models::planner_shapes(models::gpt_shape(plan.model));
  planner::default_budgets(
      shapes, planner::MemoryPlanOptions::from(plan.config, plan.mesh, plan.cuda_device >= 0),
      plan.batch.accumulate, expectations(plan, shapes).memory, memory);
}

std::string plan_run_memory(TrainPlan& plan, Runtime& runtime) {
  if (plan.unsharded || !has_final_units(plan.config)) {
    return "";
  }
  TrainMemory memory;
  memory.shapes = models::planner_shapes(models::gpt_shape(plan.model));
  plan.shapes = memory.shapes;
  plan.planning = tessera::plan_memory(runtime, runtime.group(), memory.shapes,
                                       expectations(plan, memory.shapes));
  if (plan.planning->plan) {
    memory.options = plan.planning->options;
    memory.plan = *plan.planning->plan;
    complete(plan.config, plan.model, plan.batch.num_ranks, memory);
    plan.memory = std::move(memory);
  }
  const std::string& note = plan.planning->note;
  return (note.empty() ? "" : note + "\n") +
         (plan.planning->rates ? rates_text(*plan.planning->rates) : "");
}

std::optional<double> kept_disk_s(const TrainPlan& plan, int num_local_ranks) {
  if (!plan.memory || !plan.memory->plan.uses_nvme) {
    return std::nullopt;
  }
  std::vector<tier::DiskRates> disks;
  for (const std::string& disk : disks_of(plan.config.get_list("nvme.paths"))) {
    const std::optional<tier::DiskRates> kept =
        tier::read_measured(disk, measure_options(plan.config));
    if (!kept) {
      return std::nullopt;
    }
    disks.push_back(*kept);
  }
  if (disks.empty()) {
    return std::nullopt;
  }
  StepRates rates;
  rates.num_local_ranks = num_local_ranks;
  rates.num_micro_batches = static_cast<int>(plan.batch.accumulate);
  add_disks(disks, rates);
  return predict_step(plan.memory->plan, rates).io_s;
}

std::string memory_plan_text(const TrainPlan& plan, int num_local_ranks) {
  const planner::MemoryPlan& placement = plan.memory->plan;
  std::string text =
      placement.text() + trained_text(plan.memory->shapes) + activations_text(*plan.memory);
  if (placement.uses_nvme) {
    StepRates rates;
    rates.num_local_ranks = num_local_ranks;
    rates.num_micro_batches = static_cast<int>(plan.batch.accumulate);
    std::string notes;
    measure_disks(plan.config, rates, notes);
    text += notes;
    if (placement.is_discrete) {
      // What a GPU computes meanwhile is not measured here.
      return text + disk_bound_text(placement, rates) + "\n";
    }
    const CpuTime time = measure_cpu(plan);
    rates.compute_s = time.compute_s;
    rates.update_s = time.update_s;
    text += "\n" + predict_step(placement, rates).text;
  }
  return text + "\n";
}

std::string rates_text(const planner::UpdateRates& rates) {
  std::array<char, 200> text{};
  std::snprintf(text.data(), text.size(),
                "measured at once: update on the CPU %.1f GB/s, host to device %.1f GB/s, "
                "device to host %.1f GB/s; memory of the host %.1f GB/s\n",
                rates.cpu_bytes_per_s * 1e-9, rates.h2d_bytes_per_s * 1e-9,
                rates.d2h_bytes_per_s * 1e-9, rates.host_bytes_per_s * 1e-9);
  return text.data();
}

}  // namespace tessera::cli
