// Lists of options that tests of places put together.
#pragma once

#include <string>
#include <utility>
#include <vector>

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

}  // namespace tessera::testing
