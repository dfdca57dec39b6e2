// Discrete device: chooses the updater of every shard.
//
// The device updates shards with states in device memory. The CPU updates shards whose states,
// parameter or gradient are on NVMe, because NVMe is read into and written from host memory. Shards
// with states in host memory are split: the device streams states H2D and D2H while the CPU updates
// others. Gradients of the device's part wait in its memory: if they do not fit, the CPU gets a
// larger part. Results do not depend on the split.
//
// Threads: pure functions.
#pragma once

#include <vector>

#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

struct CutModel;

// The CPU's share if no rates were measured.
inline constexpr double kDefaultCpuShare = 0.35;

// The CPU's target share: options.cpu_share, or the default.
double wished_cpu_share(const MemoryPlanOptions& options);

// Sets updater and gradient tier from the tiers of parameters and states; returns the CPU's
// resulting share of the elements with states in host memory. Assigns greedily in the order of use,
// so that the share so far is nearest to the target (the first shard goes to the device, which
// needs it first), then rebalances from the end. Gradients stay on the device if the device updates
// with states in its memory, or if it updates and there is one micro-batch; others go to the host,
// or to NVMe where `placements` has them there.
struct UpdateWish {
  double cpu_share = kDefaultCpuShare;
  std::int64_t num_micro_batches = 1;
};
double assign_updates(const CutModel& cut, const UpdateWish& wish,
                      std::vector<Placement>& placements);

// True if rates have to be measured: no share is given, and states may be in host memory. Ranks
// agree on the rates, so that they make the same plan.
bool splits_update(const MemoryPlanOptions& options);

// Rates of one rank, measured while all ranks of its host work.
struct UpdateRates {
  double cpu_bytes_per_s = 0;  // of the fused update, 28 bytes per element
  // While both directions run.
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
  // Duration of a step's last backward; 0: not known. Meanwhile states are copied H2D: into the
  // slots, and, if the duration is known, into memory that backward frees.
  double backward_s = 0;
  double h2d_alone_bytes_per_s = 0;  // while the CPU does not update; 0: the same
  // Bandwidth of host memory while the update and copies in both directions run; 0: not known, and
  // not a limit. The device's share needs less of it: the CPU reads and writes what it updates, and
  // its new parameters are copied H2D in addition.
  double host_bytes_per_s = 0;
};

// The share at which CPU and device finish at the same time. `options`: its budgets bound the
// slots. REQUIRES: rates above zero, backward_s not negative.
double choose_cpu_share(const UpdateRates& rates, const ModelShapes& model,
                        const MemoryPlanOptions& options, std::int64_t num_micro_batches = 1);

}  // namespace tessera::planner
