// `tessera generate`: a checkpoint's model continues a prompt.
//
// Threads: main thread only.
#pragma once

#include <string>

namespace tessera::cli {

// As they were typed; empty: not given.
struct GenerateFlags {
  std::string checkpoint;
  std::string prompt;
  std::string tokens;
  std::string temperature;
  std::string top_k;
  std::string seed;
  std::string device;
  std::string precision;
  bool no_cache = false;
};

inline constexpr int kDefaultGeneratedTokens = 100;
inline constexpr double kDefaultTemperature = 1;

// Prints the prompt and what comes after it, token by token, and a line end.
int run_generate(const GenerateFlags& flags);

}  // namespace tessera::cli
