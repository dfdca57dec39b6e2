// The table of options as text: for --help and for docs/options.md, which is compared with it.
//
// Threads: stateless.
#pragma once

#include <string>

namespace tessera {

// Per option a line with name, default and range, then its sentence, within 100 columns.
std::string options_help();

// The whole of docs/options.md, DeepSpeed's keys included.
std::string options_markdown();

}  // namespace tessera
