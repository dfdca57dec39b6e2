#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "tessera/core/options_doc.h"

namespace tessera::cli {

Action add_options(CLI::App& app) {
  auto markdown = std::make_shared<bool>(false);
  app.add_flag("--markdown", *markdown, "Prints docs/options.md")->disable_flag_override();
  return [markdown](const Arguments&) {
    std::cout << (*markdown ? options_markdown() : options_help());
    return kExitOk;
  };
}

}  // namespace tessera::cli
