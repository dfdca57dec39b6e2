// Chooses the cores to which a team of threads is bound, from what Linux reports about the machine.
//
// Threads that stream through memory need a physical core each: two on one core share its path to
// the caches, and a thread that migrates loses its caches. Where there are several NUMA nodes,
// neighbours in the list are on different ones, so that few threads already use the memory of all
// nodes.
//
// Ranks on one machine share its cores: each rank gets a contiguous, equally long range of cores,
// node by node. So no core belongs to two ranks, and a rank stays on one node if possible.
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
