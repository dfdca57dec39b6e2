// How long a step will take with shards on NVMe, and why.
//
// Reads and writes of a step overlap with its computation: states are read during backward and
// written during the next forward, parameters and gradients pass while units run. So a step takes
// as long as the slower of two: forward, backward and update on the processor; all bytes on the
// disk, which the ranks of a machine share.
//
// Threads: pure functions.
#pragma once

#include <string>

#include "tessera/planner/placement.h"

namespace tessera::planner {

struct StepRates {
  // Of all directories together, as measured.
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double mixed_bytes_per_s = 0;  // reads and writes at once, as many of each; both together
  int num_local_ranks = 1;       // that share the disk
  // Of one rank, all micro-batches of a step.
  double compute_s = 0;  // forward and backward
  double update_s = 0;   // of its shards, on the processor
};

struct Prediction {
  double io_s = 0;
  double processor_s = 0;
  double step_s = 0;
  bool is_io_bound = false;
  std::string text;  // the arithmetic, in lines
};

// REQUIRES: rates above zero.
Prediction predict_step(const Placement& placement, const StepRates& rates);

}  // namespace tessera::planner
