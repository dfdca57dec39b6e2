// How long a step will take with shards on NVMe, and why.
//
// Two phases follow each other. Behind a step its update overlaps with the next forward, and ends
// before the next backward makes gradients anew: states, the gradients that the update reads, and
// parameters of that forward which the update does not hand over pass the disk meanwhile. Then the
// rest: backward and further micro-batches, with their parameters and gradients. Each takes as long
// as the slower of CPU and disk; the ranks of a machine share the disk.
//
// Threads: pure functions.
#pragma once

#include <string>

#include "tessera/planner/memory_plan.h"

namespace tessera::cli {

struct StepRates {
  // Of all directories together, as measured.
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double mixed_bytes_per_s = 0;  // reads and writes at once, as many of each; both together
  int num_local_ranks = 1;       // that share the disk
  int num_micro_batches = 1;
  // Of one rank, all micro-batches of a step.
  double compute_s = 0;  // forward and backward
  double update_s = 0;   // of its shards, on the CPU
};

struct Prediction {
  double io_s = 0;
  double cpu_s = 0;
  double step_s = 0;  // at least either of them, at most their sum
  bool is_io_bound = false;
  std::string text;  // the arithmetic, in lines
};

// REQUIRES: rates above zero.
Prediction predict_step(const planner::MemoryPlan& plan, const StepRates& rates);

}  // namespace tessera::cli
