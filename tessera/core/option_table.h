// The one table of options. --help, docs/options.md, Config's checks and Config's defaults are all
// made from it; no default or range is written anywhere else.
//
// `read_by` names the modules that read an option. Where it is empty the value is checked and kept,
// nothing reads it yet, and help and docs say so.
//
// Threads: immutable.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

namespace tessera {

enum class OptionType : std::uint8_t {
  kBool,
  kInt,
  kDouble,
  kBytes,    // kept as int64; "300MiB" or a plain number
  kSeconds,  // kept as double; "10min" or a plain number
  kChoice,   // one of Option::choices
  kString,
  kList,  // of strings
};

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();
// 2^63: the first double that no int64 holds.
inline constexpr double kMaxInt64AsDouble = 0x1p63;
// The value of a byte option that is given as "unlimited".
inline constexpr std::int64_t kUnlimitedBytes = std::numeric_limits<std::int64_t>::max();

struct Option {
  std::string_view name;  // dotted: section.option
  OptionType type;
  std::string_view default_text;  // as a user would write it
  double min;                     // inclusive, for numbers
  double max;                     // inclusive
  std::string_view choices;       // "a|b|c" for kChoice
  std::string_view keyword;       // a word that numbers accept besides digits, or empty
  double keyword_value;           // what that word stands for; it need not be within the range
  std::string_view read_by;       // modules; empty: checked, not used yet
  std::string_view text;          // one sentence
  // What help and docs show as the default; empty: default_text. For an option that behaves
  // otherwise when it is not given than with default_text given.
  std::string_view unset_text = "";
};

std::span<const Option> option_table();

// Null when there is none of that name.
const Option* find_option(std::string_view name);

// Of an option that there was once: what holds instead, and what to do. Empty: there was none.
std::string_view why_removed(std::string_view name);

// The part before the first dot; the whole name where there is no dot.
std::string_view section_of(std::string_view name);

}  // namespace tessera
