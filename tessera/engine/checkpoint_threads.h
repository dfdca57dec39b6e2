// Internal to engine: with how many threads a rank hashes and copies what it saves or loads.
//
// Threads: stateless.
#pragma once

#include <algorithm>

#include "tessera/device/host_info.h"
#include "tessera/engine/runtime.h"

namespace tessera::engine {

// Its share of the host's cores. Four of them hash and copy more than a disk takes; more would only
// be in the way of a step that runs beside a save.
inline int num_checkpoint_threads(const Runtime& runtime) {
  constexpr int kMost = 4;
  return std::clamp(device::read_host_cores().usable() / runtime.num_local_ranks(), 1, kMost);
}

}  // namespace tessera::engine
