// CUDA: who updates which shard.
//
// The device, wherever states live there; the processor, wherever states or the parameter are on
// NVMe, whose new values leave from host memory. Shards whose states are in host memory are split:
// the device streams states up and down while the processor works on others. The results do not
// depend on it.
//
// Threads: pure functions.
#pragma once

#include <vector>

#include "tessera/planner/placement.h"

namespace tessera::planner {

struct CutModel;

// Where nothing was measured.
inline constexpr double kDefaultCpuShare = 0.35;

// Sets device_update and gradient from the other places; returns the share of the processor that
// came about, of the elements whose states are in host memory. In the order of use each shard goes
// to where the share so far comes nearest to options.cpu_share; the first one, which is needed
// first, to the device. Then, from the end on, shards of the side that has too much go to the other
// as long as that has not.
double assign_updates(const CutModel& cut, std::vector<ShardPlaces>& places);

// Whether a share has to be measured: none is given, and states may be in host memory. Several
// ranks have a fixed one.
bool splits_update(const PlacementOptions& options);

// Of this machine, as measured.
struct UpdateRates {
  double processor_bytes_per_s = 0;  // of the fused update, which touches 28 bytes per element
  // While both run.
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
  // Of a step's last backward; 0: not known. States go up meanwhile: into the slots, and, if it is
  // known how long it lasts, into memory that it frees.
  double backward_s = 0;
  double h2d_alone_bytes_per_s = 0;  // while the processor does not update; 0: the same
  // What memory of the host gives to the update and to copies both ways, all at once; 0: not known,
  // and more than the others need. The device's share needs less of it: the processor reads and
  // writes what it updates, and then its new parameters go up besides.
  double host_bytes_per_s = 0;
};

// The share at which processor and device end together. `options`: its budgets bound the slots.
// REQUIRES: rates above zero, backward_s not below.
double choose_cpu_share(const UpdateRates& rates, const ModelShapes& model,
                        const PlacementOptions& options);

}  // namespace tessera::planner
