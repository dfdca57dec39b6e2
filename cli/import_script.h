// cli/import/deepspeed.py, put into the program by CMake.
//
// Threads: constants.
#pragma once

#include <string_view>

namespace tessera::cli {

extern const std::string_view kDeepSpeedReader;

}  // namespace tessera::cli
