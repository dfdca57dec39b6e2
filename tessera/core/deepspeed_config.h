// From DeepSpeed's configuration to Tessera's options; internal to core.
//
// Its keys keep their meaning, units (elements) and defaults (inside each block that is given).
// "auto" is Tessera's own default, or what a flag says. What Tessera does without being asked, or
// under another name, is named in a notice; what it cannot do and would change the numbers, and
// combinations that contradict each other, are one-line ConfigErrors.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/config_input.h"

namespace tessera {

struct DeepSpeedSetting {
  const Option* option = nullptr;
  OptionValue value;        // checked; not used where `numel` or `lr_ratio` is given
  std::string from;         // `aio.queue_depth = 16`, as it stands in the file
  std::string key;          // the path alone
  bool by_default = false;  // DeepSpeed's default: gives way to anything that was really said
  // Elements whose size follows the precision, which later settings may still change.
  std::optional<std::int64_t> numel;
  std::int64_t least_bytes = 0;  // see DeepSpeedKey
  // A multiple of the learning rate, which later settings may still change.
  std::optional<double> lr_ratio;
};

struct DeepSpeedTranslation {
  std::vector<DeepSpeedSetting> settings;
  // Keys, without the settings' own: for notices().
  std::vector<std::string> autos;
  std::vector<std::string> not_needed;
  std::vector<std::string> old_names;  // "cpu_offload (now offload_optimizer)"
  std::vector<std::pair<std::string_view, std::string>>
      elsewhere;  // what does it here, and its key

  // At most three lines.
  std::vector<std::string> notices() const;
};

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source);

// What one element of a parameter takes in a precision (fp32, bf16, fp16).
std::int64_t element_bytes(std::string_view precision);

// "zero_optimization.offload_param.device" as people call it: "offload_param.device".
std::string short_key(std::string_view path);

// Saturates at kUnlimitedBytes: DeepSpeed writes "no limit" as the largest integer.
std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each);

}  // namespace tessera
