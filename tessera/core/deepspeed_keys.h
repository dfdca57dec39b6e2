// DeepSpeed's keys and what each becomes: the table behind the translation of its files and behind
// the second half of docs/options.md.
//
// Threads: immutable.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/core/option_table.h"

namespace tessera {

enum class DeepSpeedMeaning : std::uint8_t {
  kSame,            // the value is the option's value
  kElements,        // elements of parameters or gradients; bytes depend on the precision
  kMasterElements,  // elements of fp32 master weights: 4 B each
  kRenamed,         // a choice under other names; `note` holds "theirs=ours,..."
  kNotNeeded,       // checked, then named in a notice; `note` says why
  kFixed,           // only DeepSpeed's default is supported; `note` says why
  kSpecial,         // rules of its own, in deepspeed_config.cpp; `note` says what it becomes
  kElsewhere,       // a block or switch for watching a run: `note` says what does that here
  kForeign,         // a block of another subject: an error where it is enabled
};

struct DeepSpeedKey {
  std::string_view path;   // dotted, as nested in the file; a[0] is the first number of a list
  std::string_view alias;  // another name of the last part, or empty
  DeepSpeedMeaning meaning;
  OptionType type;
  std::string_view option;  // empty where nothing is set
  // Holds when the block around the key is given and the key is not; empty: Tessera's default.
  std::string_view default_text;
  std::string_view note;
  // Of elements: fewer bytes are never taken. A size of one element means "one parameter at a time"
  // to DeepSpeed, and would mean a call per element here.
  std::int64_t least_bytes = 0;
};

// A block whose keys are parts of modules' names.
inline constexpr std::string_view kDeepSpeedQuantisedNames = "weight_quantization.post_init_quant";

std::span<const DeepSpeedKey> deepspeed_keys();

// By path; the last part may be the alias. Null when there is none.
const DeepSpeedKey* find_deepspeed_key(std::string_view path);

// Whether keys are nested under this path: "aio", "zero_optimization.offload_param".
bool is_deepspeed_block(std::string_view path);

// "a.b.c" -> "a.b"; "" where there is no dot.
std::string_view parent_of(std::string_view path);

}  // namespace tessera
