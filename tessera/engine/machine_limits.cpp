#include "tessera/engine/machine_limits.h"

#include <sys/statvfs.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"

namespace tessera::engine {
namespace {

std::string ranks_text(int num_ranks) {
  return detail::concat(num_ranks, num_ranks == 1 ? " rank" : " ranks");
}

std::int64_t clamped(std::size_t bytes) {
  return static_cast<std::int64_t>(std::min(bytes, static_cast<std::size_t>(planner::kUnlimited)));
}

}  // namespace

MachineLimits MachineLimits::of_this_machine(const std::vector<std::string>& directories) {
  MachineLimits limits;
  if (const auto locked = device::locked_memory_limit_bytes()) {
    limits.locked_bytes = clamped(*locked);
  }
  for (const std::string& path : directories) {
    struct statvfs disk {};
    // One that cannot be asked has its own error when a file is made there.
    if (statvfs(path.c_str(), &disk) == 0) {
      const auto free_blocks = static_cast<std::size_t>(disk.f_bavail);
      limits.directories.push_back({path, clamped(free_blocks * disk.f_frsize)});
    }
  }
  return limits;
}

void check_fits(const planner::MemoryPlan& plan, const MachineLimits& limits, int num_local_ranks) {
  const std::int64_t pinned = plan.bytes(Tier::kPinned);
  // CUDA's driver pins memory by itself, and asks for no such limit.
  TESSERA_CHECK(plan.is_discrete || pinned <= limits.locked_bytes, ConfigError,
                "pinned memory: a rank needs ", approximate_bytes(pinned),
                ", the limit on locked memory is ", approximate_bytes(limits.locked_bytes),
                "; raise it with `ulimit -l`, or lower memory.host");
  if (limits.directories.empty()) {
    return;
  }
  const auto num_directories = static_cast<std::int64_t>(limits.directories.size());
  const std::int64_t nvme = plan.bytes(Tier::kNvme);
  const std::int64_t share = (nvme + num_directories - 1) / num_directories;
  for (const MachineLimits::Directory& directory : limits.directories) {
    TESSERA_CHECK(share <= directory.free_bytes / num_local_ranks, ConfigError,
                  ranks_text(num_local_ranks), " of ", approximate_bytes(share),
                  " each do not fit into ", directory.path, ", which has ",
                  approximate_bytes(directory.free_bytes),
                  " free; free some, name another directory or several (nvme.paths), or raise "
                  "memory.host");
  }
}

}  // namespace tessera::engine
