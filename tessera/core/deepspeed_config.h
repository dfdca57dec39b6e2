// From DeepSpeed's configuration to Tessera's options; internal to core. Its keys are in
// deepspeed_keys.h.
//
// Keys keep their meaning, units (elements) and defaults (inside each block that is given). "auto"
// is Tessera's own default, or what a flag says. A notice names what Tessera does without being
// asked, or under another name. What it cannot do, and combinations that contradict each other, are
// one-line ConfigErrors.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/config.h"

namespace tessera {

// What weight_quantization.post_init_quant says of the modules whose names contain a key.
struct DeepSpeedQuantisedNames {
  std::string key;
  std::map<std::string, OptionValue, std::less<>> values;  // "num_bits"
};

// What a file says in DeepSpeed's words, by full path ("zero_optimization.stage").
struct DeepSpeedInput {
  std::map<std::string, OptionValue, std::less<>> values;
  std::set<std::string, std::less<>> autos;   // given as "auto": as good as not given
  std::set<std::string, std::less<>> blocks;  // nested objects that are present, also if empty
  std::vector<DeepSpeedQuantisedNames> quantised_names;

  bool empty() const {
    return values.empty() && autos.empty() && blocks.empty() && quantised_names.empty();
  }
};

struct DeepSpeedTranslation {
  std::vector<ConfigSetting> settings;
  // Of keys that set nothing, and of what differs from DeepSpeed; at most four lines.
  std::vector<std::string> notices;
};

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source);

// What one element of a parameter takes in a precision (fp32, bf16, fp16).
std::int64_t element_bytes(std::string_view precision);

// "zero_optimization.offload_param.device" as people call it: "offload_param.device".
std::string short_key(std::string_view path);

// Saturates at kUnlimitedBytes: DeepSpeed writes "no limit" as the largest integer.
std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each);

}  // namespace tessera
