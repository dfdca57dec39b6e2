// `tessera inspect`: what its flags say, and the model and limits that come of them.
//
// The flags are those of `tessera train`, checked by the same code, so that what is inspected is
// what would be trained.
//
// Threads: main thread only.
#pragma once

#include <string>

#include "cli/inspect_plan.h"
#include "cli/train.h"

namespace tessera::cli {

struct InspectFlags {
  TrainFlags train;  // its ranks are planned for, and not started
  std::string link_inside;
  std::string link_across;
  bool json = false;
};

// Throws ConfigError, in one line. Allocates no tensor.
StepPlanInput checked_step_input(const TrainFlags& flags, int num_ranks);

}  // namespace tessera::cli
