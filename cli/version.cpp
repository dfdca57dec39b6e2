#include <iostream>

#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace tessera::cli {

int print_version() {
  std::cout << "tessera " TESSERA_VERSION "\n";
  return kExitOk;
}

Action add_version(CLI::App&) {
  return [](const Arguments&) { return print_version(); };
}

}  // namespace tessera::cli
