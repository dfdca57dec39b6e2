#include "tessera/device/host_info.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tessera::device {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream in(path);
  if (!in) {
    return std::nullopt;
  }
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

std::optional<std::int64_t> parse_number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) {
    return std::nullopt;
  }
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + start, end, value);
  if (error != std::errc()) {
    return std::nullopt;  // "max" among others
  }
  return value;
}

std::optional<std::size_t> read_bytes(const fs::path& path) {
  const std::optional<std::string> text = read_text(path);
  const std::optional<std::int64_t> value = text ? parse_number(*text) : std::nullopt;
  if (!value || *value < 0) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(*value);
}

// The number behind `key` in a file of lines "key number".
std::optional<std::size_t> read_keyed(const fs::path& path, std::string_view key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.size() > key.size() && line.starts_with(key) &&
        (line[key.size()] == ' ' || line[key.size()] == ':')) {
      const auto value = parse_number(std::string_view(line).substr(key.size() + 1));
      return value && *value >= 0 ? std::optional<std::size_t>(*value) : std::nullopt;
    }
  }
  return std::nullopt;
}

// The folders whose limits apply to this process: its own cgroup and all ancestors. `controller`
// is empty for version 2. A container often sees its own cgroup mounted at the top while its
// path names the host's hierarchy: folders that do not exist are passed over.
std::vector<fs::path> cgroup_folders(const fs::path& root, std::string_view controller) {
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool is_ours =
        controller.empty()
            ? names.empty()
            : ("," + names + ",").find("," + std::string(controller) + ",") != std::string::npos;
    if (!is_ours) {
      continue;
    }
    const fs::path top = root / "sys/fs/cgroup" / std::string(controller);
    std::vector<fs::path> folders;
    fs::path below = fs::path(line.substr(second + 1)).relative_path().lexically_normal();
    while (!below.empty() && below != ".") {
      folders.push_back(top / below);
      below = below.parent_path();
    }
    folders.push_back(top);
    return folders;
  }
  return {};
}

struct CgroupMemoryFiles {
  std::string_view controller, limit, used, inactive, active;
};
constexpr CgroupMemoryFiles kMemoryV2{"", "memory.max", "memory.current", "inactive_file",
                                      "active_file"};
constexpr CgroupMemoryFiles kMemoryV1{"memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_inactive_file", "total_active_file"};
// Version 1 writes "no limit" as a number near 2^63.
constexpr std::size_t kNoLimitFromBytes = std::size_t{1} << 60;

void tighten(std::optional<std::size_t>& least, std::size_t value) {
  least = least ? std::min(*least, value) : value;
}

void read_cgroup_memory(const fs::path& root, const CgroupMemoryFiles& files,
                        HostMemoryInfo& info) {
  for (const fs::path& folder : cgroup_folders(root, files.controller)) {
    const std::optional<std::size_t> limit = read_bytes(folder / files.limit);
    if (!limit || *limit >= kNoLimitFromBytes) {
      continue;
    }
    tighten(info.cgroup_limit_bytes, *limit);
    const std::size_t used = read_bytes(folder / files.used).value_or(0);
    const fs::path stat = folder / "memory.stat";
    const std::size_t reclaimable =
        read_keyed(stat, files.inactive).value_or(0) + read_keyed(stat, files.active).value_or(0);
    const std::size_t held = used - std::min(used, reclaimable);
    tighten(info.cgroup_available_bytes, *limit > held ? *limit - held : 0);
  }
}

void tighten(std::optional<double>& least, double value) {
  least = least ? std::min(*least, value) : value;
}

std::optional<double> read_quota_v2(const fs::path& root) {
  std::optional<double> quota;
  for (const fs::path& folder : cgroup_folders(root, "")) {
    std::istringstream text(read_text(folder / "cpu.max").value_or(""));
    std::string granted;
    double period_us = 0;
    if (text >> granted >> period_us && granted != "max" && period_us > 0) {
      if (const auto granted_us = parse_number(granted)) {
        tighten(quota, static_cast<double>(*granted_us) / period_us);
      }
    }
  }
  return quota;
}

std::optional<double> read_quota_v1(const fs::path& root) {
  std::optional<double> quota;
  for (const fs::path& folder : cgroup_folders(root, "cpu")) {
    const auto granted_us = read_bytes(folder / "cpu.cfs_quota_us");  // -1: no limit
    const auto period_us = read_bytes(folder / "cpu.cfs_period_us");
    if (granted_us && period_us && *period_us > 0) {
      tighten(quota, static_cast<double>(*granted_us) / static_cast<double>(*period_us));
    }
  }
  return quota;
}

int affinity_cores() {
  // The mask must be as wide as the kernel's, which the kernel tells only by refusing.
  for (std::size_t num_cpus = 1024; num_cpus <= (std::size_t{1} << 20); num_cpus *= 2) {
    cpu_set_t* const mask = CPU_ALLOC(num_cpus);
    if (mask == nullptr) {
      break;
    }
    const std::size_t mask_bytes = CPU_ALLOC_SIZE(num_cpus);
    const bool is_read = sched_getaffinity(0, mask_bytes, mask) == 0;
    const int count = is_read ? CPU_COUNT_S(mask_bytes, mask) : 0;
    const bool is_too_narrow = !is_read && errno == EINVAL;
    CPU_FREE(mask);
    if (is_read) {
      return count;
    }
    if (!is_too_narrow) {
      break;
    }
  }
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

}  // namespace

std::size_t HostMemoryInfo::total_bytes() const {
  return std::min(machine_total_bytes, cgroup_limit_bytes.value_or(machine_total_bytes));
}

std::size_t HostMemoryInfo::available_bytes() const {
  return std::min(machine_available_bytes,
                  cgroup_available_bytes.value_or(machine_available_bytes));
}

int HostCores::usable() const {
  const double granted = cgroup_quota ? std::ceil(*cgroup_quota) : static_cast<double>(affinity);
  return std::max(1, static_cast<int>(std::min(granted, static_cast<double>(affinity))));
}

HostMemoryInfo read_host_memory(const fs::path& root) {
  constexpr std::size_t kKib = 1024;
  const fs::path meminfo = root / "proc/meminfo";
  HostMemoryInfo info;
  info.machine_total_bytes = read_keyed(meminfo, "MemTotal").value_or(0) * kKib;
  info.machine_available_bytes =
      read_keyed(meminfo, "MemAvailable").value_or(read_keyed(meminfo, "MemFree").value_or(0)) *
      kKib;
  // On a machine with both versions mounted, each controller lives in one of them.
  read_cgroup_memory(root, kMemoryV2, info);
  read_cgroup_memory(root, kMemoryV1, info);
  return info;
}

std::string read_host_id(const fs::path& root) {
  std::string id;
  std::getline(std::ifstream(root / "proc/sys/kernel/random/boot_id") >> std::ws, id);
  const HostMemoryInfo info = read_host_memory(root);
  if (info.total_bytes() < info.machine_total_bytes) {
    std::error_code ignored;
    id += " " + fs::read_symlink(root / "proc/self/ns/cgroup", ignored).string();
  }
  return id;
}

HostCores read_host_cores(const fs::path& root) {
  HostCores cores;
  cores.affinity = affinity_cores();
  cores.cgroup_quota = read_quota_v2(root);
  if (const std::optional<double> older = read_quota_v1(root)) {
    tighten(cores.cgroup_quota, *older);
  }
  return cores;
}

std::optional<std::size_t> locked_memory_limit_bytes() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(limit.rlim_cur);
}

}  // namespace tessera::device
