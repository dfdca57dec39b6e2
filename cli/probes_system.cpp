#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "cli/probe.h"
#include "tessera/core/units.h"
#include "tessera/device/host_info.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

// The entries of a folder that are `prefix` and a number.
int count_numbered(const std::filesystem::path& folder, const std::string& prefix) {
  int count = 0;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool numbered = name.size() > prefix.size() && name.rfind(prefix, 0) == 0 &&
                          name.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
    count += numbered ? 1 : 0;
  }
  return count;
}

// 1.5, not 1.500000.
std::string short_number(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace

ProbeResult probe_locked_memory(std::optional<std::size_t> limit_bytes) {
  ProbeResult result{"locked memory", ProbeState::kOk, "unlimited", "", false};
  if (!limit_bytes) {
    return result;
  }
  result.found = "at most " + approximate_bytes(*limit_bytes) + " per process";
  if (*limit_bytes < kGiB) {
    result.state = ProbeState::kLimited;
    result.cost =
        "host buffers beyond that stay pageable, so copies are slower; run ulimit -l unlimited "
        "(containers: --ulimit memlock=-1)";
  }
  return result;
}

OpenFileLimit read_open_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return {};
  }
  return {static_cast<std::uint64_t>(limit.rlim_cur), static_cast<std::uint64_t>(limit.rlim_max)};
}

ProbeResult probe_open_files(const OpenFileLimit& limit) {
  constexpr std::uint64_t kEnough = 1024;
  constexpr std::uint64_t kUsual = 65536;
  ProbeResult result{"open files", ProbeState::kOk, "", "", false};
  result.found = limit.soft == static_cast<std::uint64_t>(RLIM_INFINITY)
                     ? std::string("unlimited")
                     : "at most " + std::to_string(limit.soft) + " per process";
  if (limit.soft < kEnough) {
    result.state = ProbeState::kLimited;
    result.cost = "many ranks or scratch files run out of them; run ulimit -n " +
                  std::to_string(std::min(limit.hard, kUsual));
  }
  return result;
}

ProbeResult probe_memory(const std::filesystem::path& root) {
  const device::HostMemoryInfo info = device::read_host_memory(root);
  ProbeResult result{"host memory", ProbeState::kOk, "", "", false};
  if (info.machine_total_bytes == 0) {
    result.state = ProbeState::kLimited;
    result.found = "unknown: /proc/meminfo cannot be read";
    result.cost = "budgets must be given by hand: option memory.host";
    return result;
  }
  result.found = approximate_bytes(info.available_bytes()) + " available of " +
                 approximate_bytes(info.total_bytes());
  if (info.cgroup_limit_bytes && *info.cgroup_limit_bytes < info.machine_total_bytes) {
    result.state = ProbeState::kLimited;
    result.found +=
        " (cgroup limit; the machine has " + approximate_bytes(info.machine_total_bytes) + ")";
    result.cost =
        "more than the limit ends the run (OOM kill); raise memory.max of the container "
        "if models do not fit";
  } else {
    result.found += ", no cgroup limit";
  }
  return result;
}

ProbeResult probe_cores(const std::filesystem::path& root) {
  const device::HostCores cores = device::read_host_cores(root);
  const int usable = cores.usable();
  const int machine = std::max(usable, count_numbered(root / "sys/devices/system/cpu", "cpu"));
  ProbeResult result{"cores", ProbeState::kOk, "", "", false};
  result.found = std::to_string(usable) + " usable of " + std::to_string(machine);
  if (cores.cgroup_quota && *cores.cgroup_quota < cores.affinity) {
    result.found += " (cgroup quota " + short_number(*cores.cgroup_quota) + ")";
  } else if (cores.affinity < machine) {
    result.found += " (affinity)";
  }
  if (usable < machine) {
    result.state = ProbeState::kLimited;
    result.cost =
        "updates on the CPU and I/O run on fewer cores; raise the container's cpus or "
        "its cpuset";
  }
  return result;
}

ProbeResult probe_huge_pages(const std::filesystem::path& root) {
  ProbeResult result{"huge pages", ProbeState::kOk, "", "", false};
  std::string modes;
  std::ifstream file(root / "sys/kernel/mm/transparent_hugepage/enabled");
  std::getline(file, modes);
  const std::size_t open = modes.find('[');
  const std::size_t close = modes.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    result.state = ProbeState::kMissing;
    result.found = "the kernel offers no transparent huge pages";
    result.cost = "updates on the CPU walk more page tables; a kernel with them removes that";
    return result;
  }
  const std::string mode = modes.substr(open + 1, close - open - 1);
  result.found = "transparent, " + mode;
  if (mode == "never") {
    result.state = ProbeState::kLimited;
    result.cost =
        "updates on the CPU walk more page tables; write madvise to "
        "/sys/kernel/mm/transparent_hugepage/enabled";
  }
  return result;
}

ProbeResult probe_numa(const std::filesystem::path& root) {
  ProbeResult result{"NUMA", ProbeState::kOk, "one node", "", false};
  const int num_nodes = count_numbered(root / "sys/devices/system/node", "node");
  if (num_nodes > 1) {
    result.state = ProbeState::kLimited;
    result.found = std::to_string(num_nodes) + " nodes";
    result.cost =
        "a rank that spreads over nodes reads far memory; start each rank under "
        "numactl --cpunodebind=N --membind=N";
  }
  return result;
}

}  // namespace tessera::cli
