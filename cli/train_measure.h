// What a step takes on this CPU, from one unit's forward and backward on few tokens: known
// within a second or two, whatever the size of the model, and without memory to speak of.
//
// Threads: main thread only; operators use theirs.
#pragma once

namespace tessera::cli {

struct TrainPlan;

// Of one rank, all micro-batches of a step.
struct CpuTime {
  double compute_s = 0;  // forward and backward
  double update_s = 0;   // of its shards
};

CpuTime measure_cpu(const TrainPlan& plan);

}  // namespace tessera::cli
