// Internal to planner: charges by tier and role, while they are summed up.
//
// Threads: plain data.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/planner/placement.h"

namespace tessera::planner {

// Lines come out in the order of tiers and roles.
class Lines {
 public:
  void add(Tier tier, Role role, std::int64_t bytes) {
    bytes_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)] += bytes;
  }
  std::int64_t bytes(Tier tier) const {
    const auto& roles = bytes_[static_cast<std::size_t>(tier)];
    return std::accumulate(roles.begin(), roles.end(), std::int64_t{0});
  }
  std::int64_t bytes(Tier tier, Role role) const {
    return bytes_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)];
  }
  std::vector<LedgerLine> take() const {
    std::vector<LedgerLine> lines;
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
      for (std::size_t role = 0; role < kNumRoles; ++role) {
        if (bytes_[tier][role] > 0) {
          lines.push_back({static_cast<Tier>(tier), static_cast<Role>(role), bytes_[tier][role]});
        }
      }
    }
    return lines;
  }

 private:
  std::array<std::array<std::int64_t, kNumRoles>, kNumTiers> bytes_{};
};

}  // namespace tessera::planner
