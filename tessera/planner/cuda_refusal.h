// Internal to planner: why a model does not fit on a device with memory of its own, and what would
// help.
//
// Threads: pure functions.
#pragma once

#include <cstdint>

#include "tessera/planner/ledger_lines.h"

namespace tessera::planner {

// Besides shards and gradients, at least.
struct DeviceNeed {
  std::int64_t arena_bytes = 0;
  std::int64_t slot_bytes = 0;
};
struct HostNeed {
  std::int64_t comm_bytes = 0;
  std::int64_t pool_bytes = 0;
};

// Throw ConfigError with the arithmetic. `shards`: where as little as possible is there.
[[noreturn]] void refuse_device(const PlacementOptions& options, const Lines& shards,
                                const DeviceNeed& besides);
[[noreturn]] void refuse_host(const PlacementOptions& options, const Lines& shards,
                              const HostNeed& besides);

}  // namespace tessera::planner
