#include "tessera/core/option_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/suggest.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(at + 1);
  }
}

[[noreturn]] void reject(const Option& option, const OptionValue& value, std::string_view where) {
  throw ConfigError(
      detail::concat(where, " = ", to_text(value), ": expected ", allowed_text(option)));
}

bool is_number(OptionType type) {
  return type == OptionType::kInt || type == OptionType::kDouble || type == OptionType::kBytes ||
         type == OptionType::kSeconds;
}

OptionValue keyword_value(const Option& option) {
  if (option.type == OptionType::kDouble || option.type == OptionType::kSeconds) {
    return option.keyword_value;
  }
  return option.keyword_value >= kMaxInt64AsDouble
             ? kUnlimitedBytes
             : static_cast<std::int64_t>(option.keyword_value);
}

bool in_range(const Option& option, double value) {
  return std::isfinite(value) && value >= option.min && value <= option.max;
}

// The number that a raw value stands for, in the option's unit; nullopt if it is none.
std::optional<double> number_in(const OptionValue& value) {
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  if (const auto* real = std::get_if<double>(&value)) {
    return *real;
  }
  return std::nullopt;
}

// Limits of whole numbers, exact: above 2^53 a comparison of doubles lets neighbours pass.
std::int64_t whole_limit(double limit) {
  using Limits = std::numeric_limits<std::int64_t>;
  if (limit >= kMaxInt64AsDouble) {
    return Limits::max();
  }
  return limit <= -kMaxInt64AsDouble ? Limits::min() : static_cast<std::int64_t>(limit);
}

OptionValue check_whole(const Option& option, const OptionValue& value, std::string_view where) {
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    if (*integer < whole_limit(option.min) || *integer > whole_limit(option.max)) {
      reject(option, value, where);
    }
    return *integer;
  }
  const auto real = number_in(value);
  if (!real || !in_range(option, *real) || std::floor(*real) != *real ||
      *real >= kMaxInt64AsDouble) {
    reject(option, value, where);
  }
  return static_cast<std::int64_t>(*real);
}

OptionValue check_real(const Option& option, const OptionValue& value, std::string_view where) {
  const auto real = number_in(value);
  if (!real || !in_range(option, *real)) {
    reject(option, value, where);
  }
  return *real;
}

OptionValue check_number(const Option& option, const OptionValue& value, std::string_view where) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    if (!option.keyword.empty() && *text == option.keyword) {
      return keyword_value(option);
    }
    // A string may carry a unit; a number in quotes without one is a mistake elsewhere.
    if (const auto bytes = parse_bytes(*text); bytes && option.type == OptionType::kBytes) {
      return check_whole(option, *bytes, where);
    }
    if (const auto time = parse_seconds(*text); time && option.type == OptionType::kSeconds) {
      return check_real(option, *time, where);
    }
    reject(option, value, where);
  }
  const bool whole = option.type == OptionType::kInt || option.type == OptionType::kBytes;
  return whole ? check_whole(option, value, where) : check_real(option, value, where);
}

OptionValue check_choice(const Option& option, const OptionValue& value, std::string_view where) {
  const auto* text = std::get_if<std::string>(&value);
  const auto choices = split(option.choices, '|');
  if (text == nullptr) {
    reject(option, value, where);
  }
  if (std::find(choices.begin(), choices.end(), *text) != choices.end()) {
    return *text;
  }
  const std::string_view near = nearest(*text, choices);
  throw ConfigError(detail::concat(where, " = ", to_text(value), ": expected ",
                                   allowed_text(option), near.empty() ? "" : "; did you mean ",
                                   near, near.empty() ? "" : "?"));
}

// "from 0 to 1": both ends wherever there are two, however far away.
std::string range_text(const Option& option) {
  const bool has_min = std::isfinite(option.min);
  if (option.type == OptionType::kInt || option.type == OptionType::kBytes) {
    const auto limit = [&option](double value) {
      const std::int64_t whole = whole_limit(value);
      return option.type == OptionType::kBytes ? exact_bytes(whole) : std::to_string(whole);
    };
    if (has_min && option.keyword_value >= kMaxInt64AsDouble) {
      return detail::concat(" from ", limit(option.min), " to \"", option.keyword, "\"");
    }
    return has_min ? detail::concat(" from ", limit(option.min), " to ", limit(option.max)) : "";
  }
  if (!has_min) {
    return "";
  }
  return std::isfinite(option.max)
             ? detail::concat(" from ", exact_number(option.min), " to ", exact_number(option.max))
             : detail::concat(" of at least ", exact_number(option.min));
}

}  // namespace

OptionValue check_value(const Option& option, const OptionValue& value, std::string_view where) {
  if (is_number(option.type)) {
    return check_number(option, value, where);
  }
  if (option.type == OptionType::kChoice) {
    return check_choice(option, value, where);
  }
  const auto* text = std::get_if<std::string>(&value);
  if (option.type == OptionType::kList && text != nullptr) {
    return std::vector<std::string>{*text};
  }
  const bool fits = option.type == OptionType::kBool ? std::holds_alternative<bool>(value)
                    : option.type == OptionType::kList
                        ? std::holds_alternative<std::vector<std::string>>(value)
                        : text != nullptr;
  if (!fits) {
    reject(option, value, where);
  }
  return value;
}

OptionValue parse_value(const Option& option, std::string_view text, std::string_view where) {
  const std::string copy(text);
  if (option.type == OptionType::kBool) {
    if (text == "true" || text == "on" || text == "1") {
      return true;
    }
    if (text == "false" || text == "off" || text == "0") {
      return false;
    }
  }
  if (option.type == OptionType::kInt) {
    std::int64_t whole = 0;  // exact, where a double would round
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), whole);
    if (error == std::errc() && end == text.data() + text.size()) {
      return check_value(option, whole, where);
    }
  }
  if (option.type == OptionType::kInt || option.type == OptionType::kDouble) {
    if (const auto number = parse_number(text)) {
      return check_value(option, *number, where);
    }
  }
  if (option.type == OptionType::kList) {
    std::vector<std::string> items;
    for (const std::string_view item : split(text, ',')) {
      if (!item.empty()) {
        items.emplace_back(item);
      }
    }
    return items;
  }
  return check_value(option, copy, where);
}

OptionValue default_value(const Option& option) {
  return parse_value(option, option.default_text, option.name);
}

std::string to_text(const Option& option, const OptionValue& value) {
  if (is_number(option.type) && !option.keyword.empty() && value == keyword_value(option)) {
    return std::string(option.keyword);
  }
  if (option.type == OptionType::kBytes) {
    return exact_bytes(std::get<std::int64_t>(value));
  }
  if (const auto* text = std::get_if<std::string>(&value)) {
    return option.type == OptionType::kChoice ? *text : in_quotes(*text);
  }
  return to_text(value);
}

std::string to_text(const OptionValue& value) {
  struct Visitor {
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(std::int64_t integer) const { return std::to_string(integer); }
    std::string operator()(double real) const { return exact_number(real); }
    std::string operator()(const std::string& text) const { return in_quotes(text); }
    std::string operator()(const std::vector<std::string>& list) const {
      constexpr std::size_t kShown = 8;
      std::string result = "[";
      for (std::size_t i = 0; i < std::min(list.size(), kShown); ++i) {
        result += (i == 0 ? "" : ", ") + in_quotes(list[i]);
      }
      return result + (list.size() > kShown ? ", ...]" : "]");
    }
  };
  return std::visit(Visitor{}, value);
}

std::string allowed_text(const Option& option) {
  const bool is_end = option.keyword_value >= kMaxInt64AsDouble;  // then the range names it
  const std::string keyword =
      option.keyword.empty() || is_end ? "" : detail::concat(", or \"", option.keyword, "\"");
  switch (option.type) {
    case OptionType::kBool:
      return "true or false";
    case OptionType::kInt:
      return detail::concat("a whole number", range_text(option), keyword);
    case OptionType::kDouble:
      return detail::concat(std::isfinite(option.max) ? "a number" : "a finite number",
                            range_text(option), keyword);
    case OptionType::kBytes:
      return detail::concat("a byte size like \"300MiB\",", range_text(option), keyword);
    case OptionType::kSeconds:
      return detail::concat("seconds or a duration like \"10min\",", range_text(option), keyword);
    case OptionType::kString:
      return "a string";
    case OptionType::kList:
      return "a list of strings";
    case OptionType::kChoice:
      break;
  }
  const auto choices = split(option.choices, '|');
  std::string result;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    result += i == 0 ? "" : (i + 1 == choices.size() ? " or " : ", ");
    result += choices[i];
  }
  return result;
}

}  // namespace tessera
