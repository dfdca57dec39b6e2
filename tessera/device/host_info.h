// What this process may really use of the machine it runs on: in a container the machine's own
// numbers are larger than what the kernel will grant.
//
// Reads /proc and /sys/fs/cgroup (version 2, else 1) below `root`, so that tests can lay out a
// machine of their own. A file that is missing or unreadable means "no limit from there".
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::device {

struct HostMemoryInfo {
  std::size_t machine_total_bytes = 0;
  std::size_t machine_available_bytes = 0;  // what could be had without pushing others to disk
  // The tightest limit of this process's cgroup and its ancestors, and what is left below it;
  // page cache, which the kernel drops before it ends a process, counts as left.
  std::optional<std::size_t> cgroup_limit_bytes;
  std::optional<std::size_t> cgroup_available_bytes;

  // The smaller of machine and cgroup.
  std::size_t total_bytes() const;
  std::size_t available_bytes() const;
};

struct HostCores {
  int affinity = 0;                    // cores that the scheduler may use for this process
  std::optional<double> cgroup_quota;  // cores' worth of time per period

  // Threads worth starting: the smaller of both, the quota rounded up, at least one.
  int usable() const;
};

HostMemoryInfo read_host_memory(const std::filesystem::path& root = "/");
// The same for all processes that share what read_host_memory() tells: those of one kernel, and
// where a control group has a limit, those that see the same groups (a container).
std::string read_host_id(const std::filesystem::path& root = "/");
HostCores read_host_cores(const std::filesystem::path& root = "/");

// RLIMIT_MEMLOCK of this process; nothing means unlimited.
std::optional<std::size_t> locked_memory_limit_bytes();

}  // namespace tessera::device
