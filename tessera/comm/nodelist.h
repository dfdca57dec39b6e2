// Slurm's compressed lists: host lists ("n[01-03,7],gpu5") and counts per node ("4(x2),1").
//
// The text comes from the environment and is not trusted: what does not parse, or would expand to
// more than kMaxHosts entries, is a ConfigError that shows the text; nothing is guessed.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

// Far above any cluster, far below what would hurt: "n[0-999999999]" must not eat the memory.
inline constexpr std::size_t kMaxHosts = 65536;

// All hosts, in the order of the list. Several brackets in one name multiply: "r[1-2]n[1-2]" is
// r1n1, r1n2, r2n1, r2n2. Leading zeros keep their width.
std::vector<std::string> parse_nodelist(std::string_view text);

// "4(x2),1" is 4, 4, 1: SLURM_TASKS_PER_NODE.
std::vector<int> parse_tasks_per_node(std::string_view text);

}  // namespace tessera::comm
