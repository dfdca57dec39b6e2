// What `tessera inspect` says about a planned step, as a screen and as JSON.
//
// Threads: pure functions.
#pragma once

#include <string>

#include "cli/inspect_mesh.h"
#include "cli/inspect_plan.h"

namespace tessera::cli {

// A step that was planned, and what it was planned from.
struct InspectResult {
  std::string preset;
  StepPlanInput input;
  StepPlan plan;
  MeshComparison meshes;
};

// Units and parameters (units that are alike are told once), limits, timeline, sums of a step.
std::string inspect_screen(const InspectResult& result);

// The same as one document; its keys stay. Parameters and units by name, bytes as whole numbers.
std::string inspect_json(const InspectResult& result);

}  // namespace tessera::cli
