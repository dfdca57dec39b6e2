// From DeepSpeed's configuration to Tessera's options; internal to core.
//
// Its keys keep their meaning, units (elements), defaults (inside each block that is given) and
// "auto". Each conversion yields a line that can be printed. What Tessera does without being asked
// yields a notice; what it cannot do, and combinations that contradict each other, are one-line
// ConfigErrors.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/config_input.h"

namespace tessera {

struct DeepSpeedSetting {
  const Option* option = nullptr;
  OptionValue value;        // checked; for `numel`, to be computed by bytes_of_elements
  std::string from;         // `aio.queue_depth = 16`, or the same with where a default came from
  std::string key;          // the path alone
  bool by_default = false;  // gives way to anything that was really said
  // Elements whose size follows the precision, which later settings may still change.
  std::optional<std::int64_t> numel;
};

struct DeepSpeedTranslation {
  std::vector<DeepSpeedSetting> settings;
  std::vector<std::string> notices;  // "<key>: accepted, not needed: <why>"
};

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source);

// What one element of a parameter takes in a precision (fp32, bf16, fp16).
std::int64_t element_bytes(std::string_view precision);

// Saturates at kUnlimitedBytes: DeepSpeed writes "no limit" as the largest integer.
std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each);

}  // namespace tessera
