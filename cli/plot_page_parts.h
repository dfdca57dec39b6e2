// The files of cli/plot_page/, put into the program by CMake.
//
// Threads: constants.
#pragma once

#include <string_view>

namespace tessera::cli {

extern const std::string_view kPageHtml;    // with {{title}}, {{style}}, {{script}} and {{data}}
extern const std::string_view kPageStyle;   // CSS
extern const std::string_view kPageScript;  // JavaScript

}  // namespace tessera::cli
