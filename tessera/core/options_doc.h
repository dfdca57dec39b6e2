// The table of options as text: for --help and for docs/options.md, which is compared with it.
//
// Threads: stateless.
#pragma once

#include <string>

namespace tessera {

// Two lines per option: name, type, default and range; then the sentence.
std::string options_help();

// The whole of docs/options.md, DeepSpeed's keys included.
std::string options_markdown();

}  // namespace tessera
