// The real binary, driven as a user drives it.
#pragma once

#include <string>
#include <vector>

#include "tests/support/process.h"

namespace tessera::testing {

inline ProcessResult run_tessera(std::vector<std::string> arguments,
                                 const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), TESSERA_BINARY);
  return run_process(arguments, options);
}

}  // namespace tessera::testing
