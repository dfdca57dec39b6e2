#include "tessera/optim/core_binding.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) {
    return std::nullopt;
  }
  return number;
}

// The CPUs of one physical core are described by the same list; its first one names the core.
int core_of(int cpu, const std::filesystem::path& of_cpu) {
  // The second name is that of kernels before 5.5.
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {
    std::ifstream file(of_cpu / "topology" / name);
    std::string list;
    if (std::getline(file, list)) {
      return parse_number(list).value_or(cpu);
    }
  }
  return cpu;
}

// From the entry "node1" beside the topology.
int node_of(const std::filesystem::path& of_cpu) {
  constexpr std::string_view kPrefix = "node";
  std::error_code error;
  for (std::filesystem::directory_iterator entry(of_cpu, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(kPrefix)) {
      if (const auto node = parse_number(std::string_view(name).substr(kPrefix.size()))) {
        return *node;
      }
    }
  }
  return 0;
}

struct Core {
  int node = 0;
  int cpu = 0;  // one of those that it has
};

// Of the rank, node after node.
std::vector<Core> cores_of_share(std::span<const int> usable, const std::filesystem::path& cpu_root,
                                 CoreShare share) {
  std::vector<int> cpus(usable.begin(), usable.end());
  std::sort(cpus.begin(), cpus.end());
  std::set<int> seen;
  std::vector<Core> cores;
  for (const int cpu : cpus) {
    const std::filesystem::path of_cpu = cpu_root / ("cpu" + std::to_string(cpu));
    if (seen.insert(core_of(cpu, of_cpu)).second) {
      cores.push_back({node_of(of_cpu), cpu});
    }
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](const Core& a, const Core& b) { return a.node < b.node; });
  const auto num_ranks = static_cast<std::size_t>(share.num_ranks);
  const std::size_t count = cores.size() / num_ranks;
  const auto begin =
      cores.begin() + static_cast<std::ptrdiff_t>(count * static_cast<std::size_t>(share.rank));
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace

std::vector<int> cores_for_threads(int num_threads, std::span<const int> usable,
                                   const std::filesystem::path& cpu_root, CoreShare share) {
  TESSERA_INVARIANT(share.rank >= 0 && share.rank < share.num_ranks, "the cores of rank ",
                    share.rank, " of ", share.num_ranks);
  const std::vector<Core> cores = cores_of_share(usable, cpu_root, share);
  if (num_threads < 1 || cores.size() < static_cast<std::size_t>(num_threads)) {
    return {};
  }
  std::map<int, std::vector<int>> cpus_of_node;
  for (const Core& core : cores) {
    cpus_of_node[core.node].push_back(core.cpu);
  }
  std::vector<int> chosen;
  for (std::size_t round = 0; round < cores.size(); ++round) {
    for (const auto& [node, of_node] : cpus_of_node) {
      if (round < of_node.size() && chosen.size() < static_cast<std::size_t>(num_threads)) {
        chosen.push_back(of_node[round]);
      }
    }
  }
  return chosen;
}

std::vector<int> cores_for_threads(int num_threads, CoreShare share) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return {};  // more CPUs than the set has room for: threads go where the system likes
  }
  std::vector<int> usable;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) {
      usable.push_back(cpu);
    }
  }
  return cores_for_threads(num_threads, usable, "/sys/devices/system/cpu", share);
}

}  // namespace tessera::optim
