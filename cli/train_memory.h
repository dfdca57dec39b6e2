// Where a run's shards will live: planned, checked against the machine, and told before anything is
// allocated. There is a plan where an option asks for it (a budget, a place, or NVMe), or where the
// machine does not hold everything.
//
// Includes models, hence torch: for train_*.cpp and inspect_model.cpp only.
//
// Threads: main thread only.
#pragma once

#include <optional>
#include <string>

#include "cli/train_memory_plan.h"
#include "models/gpt.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/config.h"
#include "tessera/engine/runtime.h"
#include "tessera/planner/update_split.h"

namespace tessera::cli {

struct TrainPlan;

// Whether an option asks for it or not. Throws ConfigError, with the arithmetic, if it does not
// fit. REQUIRES: batch.total and batch.accumulate are set.
TrainMemory make_memory_plan(const Config& config, const models::GptOptions& model,
                             const comm::Mesh& mesh, bool on_cuda);

// Null: nothing asks for it.
std::optional<TrainMemory> plan_memory(const Config& config, const models::GptOptions& model,
                                       const comm::Mesh& mesh, bool on_cuda);

// Collective: plans the memory of this run as its engine would (engine/memory_planning.h), with
// what is known of the model's activations, and keeps that in the plan, for the engine. Returns
// what was found and measured on the way, in lines. Nothing where units are only known when they
// are made: then the engine plans.
std::string plan_run_memory(TrainPlan& plan, Runtime& runtime);

// Throws ConfigError if this host cannot give it to so many ranks, or a directory is no place for
// it. For the one who starts them; asks no GPU.
void check_machine(const TrainPlan& plan, int num_local_ranks);

// What the disks take of a step, at least, by rates that an earlier run has kept; none where one of
// them has not been measured, or nothing is offloaded there. Measures nothing.
std::optional<double> kept_disk_s(const TrainPlan& plan, int num_local_ranks);

// The table, and the predicted time of a step: measures the disk, unless that was done before, and
// what a unit takes on this CPU, for about two seconds. For one rank of a machine.
std::string memory_plan_text(const TrainPlan& plan, int num_local_ranks);

// One line.
std::string rates_text(const planner::UpdateRates& rates);

}  // namespace tessera::cli
