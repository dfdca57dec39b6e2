// The real program, driven as a user drives it.
#pragma once

#include <string>
#include <vector>

#include "cli/program.h"
#include "tests/support/process.h"

namespace tessera::testing {

inline ProcessResult run_tessera(std::vector<std::string> arguments,
                                 const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), TESSERA_BINARY);
  return run_process(arguments, options);
}

// The same without starting the binary, for input that is refused before anything is done: a fork
// of this process runs the program's main function.
inline ProcessResult run_tessera_forked(std::vector<std::string> arguments,
                                        ProcessOptions options = {}) {
  arguments.insert(arguments.begin(), TESSERA_BINARY);
  options.body = [&arguments] {
    std::vector<char*> argv;
    for (std::string& argument : arguments) {
      argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    return cli::run_program(static_cast<int>(arguments.size()), argv.data());
  };
  return run_process(arguments, options);
}

}  // namespace tessera::testing
