// What is planned, without torch, and in words.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/gpt_activations.h"
#include "models/gpt_shapes.h"
#include "tessera/planner/memory_plan.h"

namespace tessera::cli {

struct TrainMemory {
  planner::ModelShapes shapes;
  planner::MemoryPlanOptions options;
  planner::MemoryPlan plan;
  std::vector<std::string> state_names;  // of the update rule
  models::GptActivations activations;    // of a micro-batch of a rank; torch's, in no budget
  std::int64_t device_peak_bytes = 0;    // of a GPU: everything, activations and gradients too
};

// Of a GPU, at most, with micro-batches of `batch` sequences.
std::int64_t device_peak_bytes(const planner::ModelShapes& shapes, const planner::MemoryPlan& plan,
                               const models::GptOptions& model, std::int64_t batch);

// How much of the model is trained, and how much frozen, in a line; empty where all is trained.
std::string trained_text(const planner::ModelShapes& shapes);

// What activations take besides, and all of a GPU's memory with them.
std::string activations_text(const TrainMemory& memory);

}  // namespace tessera::cli
