// What tests of places put together: options, and the cases that are trained with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/dtype.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {

using Options = std::vector<std::pair<std::string, std::string>>;

inline Options joined(Options first, const Options& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Nothing is measured: tests run side by side.
inline Options nvme_in(const DiskDirectory& directory) {
  return {{"nvme.paths", directory.path().string()},
          {"nvme.block_bytes", "64KiB"},
          {"nvme.queue_depth", "4"},
          {"nvme.threads", "2"}};
}

struct Placed {
  std::string name;
  Options options;
};

struct TrainedCase {
  int ranks = 1;
  int accumulate = 1;
  std::string kind = "adamw";
  DType dtype = DType::kFloat32;
};

inline std::string name_of(const TrainedCase& each) {
  return each.kind + "_" + std::string(to_string(each.dtype)) + "_ranks" +
         std::to_string(each.ranks) + "_accumulate" + std::to_string(each.accumulate);
}

// All places are tried with the first case (on a GPU, with all: there it takes seconds). Every
// other case is tried with the `core` places, which have most in them, and with one more, in turn:
// so each meets several ranks, micro-batches, rules and types, but not every one of them.
constexpr std::size_t kAllPlaces = 0;
inline std::vector<Placed> places_of_case(const std::vector<Placed>& all, std::size_t case_index,
                                          const std::vector<std::string>& core) {
  if (case_index == kAllPlaces) {
    return all;
  }
  std::vector<Placed> chosen;
  std::vector<Placed> others;
  for (const Placed& placed : all) {
    const bool is_core = std::find(core.begin(), core.end(), placed.name) != core.end();
    (is_core ? chosen : others).push_back(placed);
  }
  chosen.push_back(others[case_index % others.size()]);
  return chosen;
}

}  // namespace tessera::testing
