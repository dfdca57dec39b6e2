// The JSON text of a config, taken apart into named values; internal to core.
//
// This is the only place that sees JSON. It decides which keys are Tessera's and which are
// DeepSpeed's, rejects keys that are neither, and leaves the meaning of values to the others.
//
// Threads: stateless.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "tessera/core/option_value.h"

namespace tessera {

// What a file says in DeepSpeed's words, by full path ("zero_optimization.stage").
struct DeepSpeedInput {
  std::map<std::string, OptionValue, std::less<>> values;
  std::set<std::string, std::less<>> autos;   // given as "auto": as good as not given
  std::set<std::string, std::less<>> blocks;  // nested objects that are present, also if empty
};

struct ConfigInput {
  std::map<std::string, OptionValue, std::less<>> own;  // by option name, types not checked yet
  DeepSpeedInput deepspeed;
};

// Throws a one-line ConfigError that begins with `source` for text that is not JSON (with line and
// column), a key that is given twice, and a key that nobody knows (with the nearest known one).
ConfigInput read_config(std::string_view text, std::string_view source);

}  // namespace tessera
