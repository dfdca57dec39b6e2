#include "cli/flag_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

// More does not fit into the memory of any machine, and would overflow products of sizes.
constexpr std::int64_t kMaxSizeBytes = std::int64_t{1} << 40;

}  // namespace

std::int64_t parse_count(std::string_view flag, std::string_view text, std::int64_t min,
                         std::int64_t max) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  TESSERA_CHECK(error == std::errc() && stop == end && value >= min && value <= max, ConfigError,
                flag, " ", tessera::in_quotes(text), " is not a whole number from ", min, " to ",
                max);
  return value;
}

double parse_positive(std::string_view flag, std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  TESSERA_CHECK(error == std::errc() && stop == end && std::isfinite(value) && value > 0,
                ConfigError, flag, " ", tessera::in_quotes(text), " is not a number above 0");
  return value;
}

DType parse_precision(std::string_view flag, std::string_view text) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (text == to_string(dtype)) {
      return dtype;
    }
  }
  throw ConfigError(
      detail::concat(flag, " ", tessera::in_quotes(text), " is none of fp32, bf16, fp16"));
}

double parse_duration(std::string_view flag, std::string_view text) {
  const std::string spelled = text.ends_with('m') ? std::string(text) + "in" : std::string(text);
  const auto seconds = parse_seconds(spelled);
  TESSERA_CHECK(seconds && *seconds > 0, ConfigError, flag, " ", tessera::in_quotes(text),
                " is not a time above 0; write for example 30s, 45min or 2h");
  return *seconds;
}

double parse_rate(std::string_view flag, std::string_view text) {
  constexpr std::string_view kPerSecond = "/s";
  const bool has_unit = text.ends_with(kPerSecond);
  const auto bytes = parse_bytes(has_unit ? text.substr(0, text.size() - kPerSecond.size()) : text);
  TESSERA_CHECK(bytes && *bytes >= 1, ConfigError, flag, " ", tessera::in_quotes(text),
                " is not a rate of at least 1B per second; write for example 300GB or 12.5GiB/s");
  return static_cast<double>(*bytes);
}

std::vector<std::size_t> parse_sizes(std::string_view flag, std::string_view text) {
  std::vector<std::size_t> sizes;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, comma - begin);
    const auto bytes = parse_bytes(item);
    TESSERA_CHECK(bytes && *bytes >= 1 && *bytes <= kMaxSizeBytes, ConfigError, flag, ": ",
                  tessera::in_quotes(item), " is not a size from 1B to ",
                  exact_bytes(kMaxSizeBytes), "; write for example 4KiB,1MiB");
    sizes.push_back(static_cast<std::size_t>(*bytes));
    begin = comma + 1;
  }
  return sizes;
}

}  // namespace tessera::cli
