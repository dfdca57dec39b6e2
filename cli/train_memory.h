// Where a run's shards will live: planned, checked against the machine, and told before anything is
// allocated. Nothing of it happens unless an option asks for it: a budget, a place, or NVMe.
//
// Includes models, hence torch: for train_*.cpp and inspect_model.cpp only.
//
// Threads: main thread only.
#pragma once

#include <optional>
#include <string>

#include "cli/train_memory_plan.h"
#include "models/gpt.h"
#include "tessera/core/config.h"
#include "tessera/planner/update_split.h"

namespace tessera::cli {

struct TrainPlan;

// Whether an option asks for it or not. Throws ConfigError, with the arithmetic, if it does not
// fit. REQUIRES: batch.total and batch.accumulate are set.
TrainMemory make_memory_plan(const Config& config, const models::GptOptions& model, int num_ranks,
                             bool on_cuda);

// Null: nothing asks for it.
std::optional<TrainMemory> plan_memory(const Config& config, const models::GptOptions& model,
                                       int num_ranks, bool on_cuda);

// Where the GPU does not hold everything and nobody gave a budget for it, gives one that does (see
// cli/default_budgets.h), plans with it, and returns a line that says so; else returns nothing,
// and changes nothing. Asks the GPU what it has free.
std::string give_default_budgets(TrainPlan& plan);

// Throws ConfigError if this machine cannot give it to so many ranks, or a directory is no place
// for it.
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
