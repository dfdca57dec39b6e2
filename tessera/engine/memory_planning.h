// The plan of memory of an engine: by the budgets of the config, and where it has none, by what the
// machine has (planner/memory_budgets.h). `Engine` and `tessera train` call the same function,
// before anything is allocated. What cannot be had is refused with the arithmetic, on all ranks
// alike.
//
// Order of collectives, over the group of the engine: one exchange of each rank's free memory, then
// Runtime::update_rates() if the plan needs measured rates. Both happen at the construction of an
// engine with the shapes of its model, otherwise before the first forward. If the first step() has
// measured activations, the exchange is repeated after its all-reduce.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/engine/runtime.h"
#include "tessera/planner/memory_budgets.h"
#include "tessera/planner/memory_plan.h"

namespace tessera {

// Memory and time of a step in addition to shards, for default budgets and the CPU's share.
struct StepExpectations {
  // Activations: if they are not known, they are measured in the first step on a discrete device.
  planner::StepMemory memory;
  // Vectors that a backward of this rank multiplies each parameter with; 0: not known.
  std::int64_t tokens_per_backward = 0;
};

// Memory that an engine has allocated so far; it counts as free.
struct HeldMemory {
  std::int64_t device_bytes = 0;  // of a discrete device
  std::int64_t host_bytes = 0;
};

struct MemoryPlanning {
  comm::Mesh mesh;                     // whose ranks were asked
  planner::MemoryPlanOptions asked;    // as the config says
  planner::MemoryPlanOptions options;  // with budgets and share as they were found
  // Null: no budget applies, and everything stays in device memory.
  std::optional<planner::MemoryPlan> plan;
  bool is_for_first_step = false;             // see refined()
  planner::RankMemory memory;                 // what there was
  std::int64_t tensor_bytes = 0;              // of torch on this rank's device, when that was asked
  std::string note;                           // what was found, for people; empty: as asked
  std::optional<planner::UpdateRates> rates;  // where they were measured
};

// Whether anything of a config asks for a plan.
bool asks_for_plan(const Config& config);

// Collective. Throws ConfigError for what the machine cannot give.
MemoryPlanning plan_memory(Runtime& runtime, comm::Group& group, const planner::ModelShapes& model,
                           const StepExpectations& step = {}, const HeldMemory& held = {});

// Collective, after the first step of a plan with is_for_first_step: plans again with the measured
// activations. Returns the previous plan if no other is possible.
MemoryPlanning refined(const MemoryPlanning& first, Runtime& runtime, comm::Group& group,
                       const planner::ModelShapes& model);

}  // namespace tessera
