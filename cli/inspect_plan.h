// What a step of training will gather, and when: pure arithmetic over a model's shapes, by the very
// planner that the engine runs. Nothing is allocated and no rank is started, so that it answers for
// models and numbers of ranks far beyond this machine.
//
// It follows what the coordinator does once it knows the trace: from the second step on. The trace
// is that of a chain of units: forward in order, backward in reverse, for each micro-batch. A test
// trains and compares.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cli/train_memory_plan.h"
#include "models/gpt_shapes.h"
#include "tessera/comm/mesh.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/planner/mesh_choice.h"
#include "tessera/shard/layout.h"

namespace tessera::cli {

inline std::size_t index_of(int number) { return static_cast<std::size_t>(number); }

struct StepPlanInput {
  models::ModelShape model;
  comm::Mesh mesh;  // a parameter is cut for the ranks of a shard group
  planner::TrafficModes modes;
  coordinator::CoordinatorOptions options;
  std::int64_t num_micro_batches = 1;  // of a rank
  // Budgets, tiers and NVMe, where an option asks for them; its limits count.
  std::optional<TrainMemory> memory;
  // On a GPU where none does: everything there. Told, and not followed.
  std::optional<TrainMemory> resident;
  // Of a step, at least, by what was measured of the disks before; none: they were not.
  std::optional<double> disk_s;
  // What other meshes would take is planned from these; their ranks do not count.
  planner::ModelShapes shapes;
  planner::MemoryPlanOptions memory_options;
};

// Bytes are those of full parameters, padding included.
struct GatherCall {
  std::vector<int> params;
  std::int64_t bytes = 0;
};

struct TimelineUse {
  coordinator::Use use;
  GatherCall demand;              // gathered when the use begins: it waits; without params: nothing
  std::vector<GatherCall> ahead;  // started once it has begun
  std::vector<int> release;       // when it ends
  std::int64_t held_bytes = 0;    // at most, while it runs
};

struct StepTotals {
  std::int64_t num_gathers = 0;
  std::int64_t gathered_bytes = 0;
  std::int64_t num_misses = 0;  // parameters that a use has to wait for from their start
  std::int64_t peak_bytes = 0;  // of full parameters held at once
};

struct StepPlan {
  struct Unit {
    std::vector<int> params;    // own and external, ascending
    std::vector<int> gathered;  // of them: in a group of one, those that live elsewhere
    std::int64_t full_bytes = 0;
    std::int64_t gathered_bytes = 0;
    std::int64_t shard_bytes = 0;  // of what it owns
  };

  // By parameter.
  std::vector<shard::Layout> layouts;
  std::vector<bool> persists;
  std::vector<int> owners;                // the first unit that needs it
  std::vector<int> num_units;             // that need it
  std::vector<std::int64_t> num_gathers;  // of a step
  // By unit.
  std::vector<Unit> units;

  std::int64_t numel = 0;
  std::int64_t full_bytes = 0;
  std::int64_t shard_bytes = 0;
  std::int64_t persistent_bytes = 0;
  std::int64_t arena_bytes = 0;  // 0 in a group of one with all shards in memory

  std::vector<GatherCall> before;  // started when the step before has ended
  std::vector<TimelineUse> uses;   // of all micro-batches
  StepTotals step;
};

// Throws ConfigError for more micro-batches than anybody could want.
StepPlan plan_step(const StepPlanInput& input);

}  // namespace tessera::cli
