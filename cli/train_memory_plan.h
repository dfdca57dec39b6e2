// What is planned, without torch.
//
// Threads: plain data.
#pragma once

#include "models/gpt_shapes.h"
#include "tessera/planner/placement.h"

namespace tessera::cli {

struct MemoryPlan {
  planner::ModelShapes shapes;
  planner::PlacementOptions options;
  planner::Placement placement;
  bool is_final = true;                  // the engine will plan the same
  std::vector<std::string> state_names;  // of the update rule
};

}  // namespace tessera::cli
