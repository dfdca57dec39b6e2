// Discrete device: who updates which shard.
//
// The device, wherever states live there; the CPU, wherever states or the parameter are on NVMe,
// whose new values are written from host memory. Shards whose states are in host memory are split:
// the device streams states H2D and D2H while the CPU works on others. Gradients of the device's
// wait there for their update: where its memory does not hold them, the CPU gets more. The results
// do not depend on it.
//
// Threads: pure functions.
#pragma once

#include <vector>

#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

struct CutModel;

// Where nothing was measured.
inline constexpr double kDefaultCpuShare = 0.35;

// What the CPU shall have: options.cpu_share, or the default.
double wished_cpu_share(const MemoryPlanOptions& options);

// Sets updater and gradient from the tiers of parameters and states; returns the CPU's share that
// came about, of the elements whose states are in host memory. Assigns greedily in the order of
// use, so that the share so far is nearest to the wish (the first shard, which is needed first, to
// the device), then rebalances from the end. Gradients stay on the device where the device updates
// with states that live there, or with the only micro-batch's; others go to the host.
struct UpdateWish {
  double cpu_share = kDefaultCpuShare;
  std::int64_t num_micro_batches = 1;
};
double assign_updates(const CutModel& cut, const UpdateWish& wish,
                      std::vector<Placement>& placements);

// Whether a share has to be measured: none is given, and states may be in host memory. Several
// ranks agree on the rates, so that they plan alike.
bool splits_update(const MemoryPlanOptions& options);

// Of one rank, as measured while all ranks of its host work.
struct UpdateRates {
  double cpu_bytes_per_s = 0;  // of the fused update, which touches 28 bytes per element
  // While both run.
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
  // Of a step's last backward; 0: not known. States are copied H2D meanwhile: into the slots, and,
  // if it is known how long it lasts, into memory that it frees.
  double backward_s = 0;
  double h2d_alone_bytes_per_s = 0;  // while the CPU does not update; 0: the same
  // What memory of the host gives to the update and to copies both ways, all at once; 0: not known,
  // and more than the others need. The device's share needs less of it: the CPU reads and writes
  // what it updates, and then its new parameters are copied H2D besides.
  double host_bytes_per_s = 0;
};

// The share at which CPU and device end together. `options`: its budgets bound the slots.
// REQUIRES: rates above zero, backward_s not below.
double choose_cpu_share(const UpdateRates& rates, const ModelShapes& model,
                        const MemoryPlanOptions& options, std::int64_t num_micro_batches = 1);

}  // namespace tessera::planner
