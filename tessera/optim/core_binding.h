// Which cores a team of threads is best bound to, by what Linux says of the machine.
//
// Threads that stream through memory want a physical core each: two on one core share its path to
// the caches, and a thread that wanders leaves its caches behind. Neighbours in the list are on
// different NUMA nodes where there are several, so that few threads already reach the memory of
// all.
//
// Ranks on one machine share its cores: each has a run of its own, node after node, as long as the
// others'. So no two of them meet on a core, and a rank keeps to one node where it can.
//
// Threads: stateless.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

namespace tessera::optim {

// Whose cores: those of one rank among those of this machine.
struct CoreShare {
  int rank = 0;
  int num_ranks = 1;
};

// One CPU number for each of `num_threads` threads, all on different physical cores that the
// calling thread may use. Empty if the rank's share has fewer such cores than threads: then binding
// would do harm.
std::vector<int> cores_for_threads(int num_threads, CoreShare share = {});

// The same for `usable` CPUs of a machine that is described under `cpu_root`, in the way of
// /sys/devices/system/cpu. A CPU without a description counts as a core of its own, on node 0.
std::vector<int> cores_for_threads(int num_threads, std::span<const int> usable,
                                   const std::filesystem::path& cpu_root, CoreShare share = {});

}  // namespace tessera::optim
