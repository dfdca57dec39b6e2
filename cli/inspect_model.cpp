// Apart from inspect.cpp, since the headers of models bring torch's.
#include <iostream>

#include "cli/inspect.h"
#include "cli/train_memory.h"
#include "cli/train_plan.h"
#include "tessera/core/error.h"

namespace tessera::cli {

StepPlanInput checked_step_input(const TrainFlags& flags, int num_ranks) {
  comm::Rendezvous place;
  place.world_size = num_ranks;
  place.local_world_size = num_ranks;
  const TrainPlan plan = checked_plan(flags, place, PlanFor::kInspection);
  for (const std::string& note : plan.notes) {
    std::cerr << "tessera: warning: " + note + "\n";
  }
  TESSERA_CHECK(
      plan.config.get_list("unit.dynamic_names").empty(), ConfigError,
      "unit.dynamic_names is set: what dynamic units gather is agreed on from use to use, "
      "not planned; leave it out to inspect");
  StepPlanInput input;
  input.model = models::gpt_shape(plan.model);
  input.mesh = plan.mesh;
  input.modes = planner::TrafficModes::from(plan.config, plan.mesh);
  input.options = coordinator::CoordinatorOptions::from(plan.config);
  input.num_micro_batches = plan.batch.accumulate;
  const bool on_cuda = plan.cuda_device >= 0;
  if (plan.memory) {
    coordinator::PlanBudgets& budgets = input.options.budgets;
    const planner::MemoryPlan& memory = plan.memory->plan;
    budgets.live_limit_bytes = memory.live_limit_bytes;
    if (memory.max_inflight > 0) {
      budgets.max_inflight = memory.max_inflight;
    }
    if (memory.reuse_distance_bytes > 0) {
      budgets.reuse_distance_bytes = memory.reuse_distance_bytes;
    }
  } else if (on_cuda) {
    input.resident = make_memory_plan(plan.config, plan.model, plan.mesh, on_cuda);
  }
  input.memory = plan.memory;
  input.disk_s = kept_disk_s(plan, plan.mesh.ranks_per_host());
  input.shapes = models::planner_shapes(input.model);
  input.memory_options = planner::MemoryPlanOptions::from(plan.config, num_ranks, on_cuda);
  return input;
}

}  // namespace tessera::cli
