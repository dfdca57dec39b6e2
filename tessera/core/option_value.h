// Values of options: from text or JSON scalars to a checked value of the option's type, and back.
//
// A checked value always holds the alternative of its type: bool (kBool), int64 (kInt, kBytes),
// double (kDouble, kSeconds), string (kChoice, kString), vector of strings (kList).
// Every failure is a one-line ConfigError: `where` (source and key), the value, what is allowed.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/core/option_table.h"

namespace tessera {

using OptionValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

// From a value as a program or a JSON file gives it: 1e8 is an integer, "300MiB" a byte size,
// a single string a list of one.
OptionValue check_value(const Option& option, const OptionValue& value, std::string_view where);

// From the text of a flag: also on/off, and lists separated by commas.
OptionValue parse_value(const Option& option, std::string_view text, std::string_view where);

OptionValue default_value(const Option& option);

// As a user would write it; printable and on one line.
std::string to_text(const Option& option, const OptionValue& value);
// A raw value, before it was checked.
std::string to_text(const OptionValue& value);

// "a number from 0 to 1", "fp32, bf16 or fp16": what check_value lets pass.
std::string allowed_text(const Option& option);

}  // namespace tessera
