// What `tessera inspect` says about tiers: bytes per tier and role, and which extent of NVMe holds
// what.
//
// Threads: pure functions.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "cli/train_memory_plan.h"

namespace tessera::cli {

// The table, the first extents of each role and their sums.
std::string tiers_screen(const TrainMemory& memory);

// All of it: extents by parameter, role and offset.
nlohmann::ordered_json tiers_json(const TrainMemory& memory);

}  // namespace tessera::cli
