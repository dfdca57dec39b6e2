#include "tessera/core/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "tessera/core/printable.h"

namespace tessera {
namespace {

struct Suffix {
  std::string_view text;  // lower case
  double factor;
};

constexpr double kKibi = 1024.0;
constexpr std::array kByteSuffixes = {
    Suffix{"", 1.0},
    Suffix{"b", 1.0},
    Suffix{"k", 1e3},
    Suffix{"kb", 1e3},
    Suffix{"kib", kKibi},
    Suffix{"m", 1e6},
    Suffix{"mb", 1e6},
    Suffix{"mib", kKibi* kKibi},
    Suffix{"g", 1e9},
    Suffix{"gb", 1e9},
    Suffix{"gib", kKibi* kKibi* kKibi},
    Suffix{"t", 1e12},
    Suffix{"tb", 1e12},
    Suffix{"tib", kKibi* kKibi* kKibi* kKibi},
};
constexpr std::array kSecondSuffixes = {
    Suffix{"", 1.0},    Suffix{"s", 1.0},    Suffix{"ms", 1e-3},
    Suffix{"us", 1e-6}, Suffix{"min", 60.0}, Suffix{"h", 3600.0},
};

std::string_view trim(std::string_view text) {
  const auto begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// The number and its factor are kept apart so that a caller can apply the factor exactly.
template <typename Suffixes>
std::optional<std::pair<double, double>> parse_scaled(std::string_view text,
                                                      const Suffixes& suffixes) {
  text = trim(text);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value)) {
    return std::nullopt;
  }
  const auto rest = lower_case(trim(text.substr(static_cast<std::size_t>(end - text.data()))));
  for (const Suffix& suffix : suffixes) {
    if (suffix.text == rest) {
      return std::pair{value, suffix.factor};
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  // Whole numbers go through no double: 2^53 + 1 must stay what it is.
  const std::string_view digits = trim(text);
  std::int64_t whole = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), whole);
  const auto rest = lower_case(trim(digits.substr(static_cast<std::size_t>(end - digits.data()))));
  for (const Suffix& suffix : kByteSuffixes) {
    const auto factor = static_cast<std::int64_t>(suffix.factor);
    if (error == std::errc() && suffix.text == rest) {
      const bool fits = whole >= 0 && whole <= std::numeric_limits<std::int64_t>::max() / factor;
      return fits ? std::optional(whole * factor) : std::nullopt;
    }
  }
  const auto scaled = parse_scaled(text, kByteSuffixes);
  if (!scaled) {
    return std::nullopt;
  }
  const double product = scaled->first * scaled->second;
  const double bytes = std::nearbyint(product);
  // 0.1 is not a binary fraction: allow what rounding of the decimal can explain, not more.
  if (!(bytes >= 0.0) || bytes >= 0x1p63 || std::abs(product - bytes) > 1e-12 * bytes) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(bytes);
}

std::optional<double> parse_seconds(std::string_view text) {
  const auto scaled = parse_scaled(text, kSecondSuffixes);
  if (!scaled || !(scaled->first >= 0.0) || !std::isfinite(scaled->first * scaled->second)) {
    return std::nullopt;
  }
  return scaled->first * scaled->second;
}

std::optional<double> parse_number(std::string_view text) {
  constexpr std::array<Suffix, 1> kNoSuffix = {Suffix{"", 1.0}};
  const auto scaled = parse_scaled(text, kNoSuffix);
  return scaled ? std::optional(scaled->first) : std::nullopt;
}

std::string exact_bytes(std::int64_t bytes) {
  // The largest unit that loses nothing, binary or decimal, whichever is shorter to read.
  const auto in_units = [bytes](std::int64_t factor, std::array<std::string_view, 5> units) {
    std::int64_t count = bytes;
    std::size_t unit = 0;
    while (unit + 1 < units.size() && count != 0 && count % factor == 0) {
      count /= factor;
      ++unit;
    }
    return std::to_string(count).append(units[unit]);
  };
  const std::string binary = in_units(1024, {"B", "KiB", "MiB", "GiB", "TiB"});
  const std::string decimal = in_units(1000, {"B", "kB", "MB", "GB", "TB"});
  return decimal.size() < binary.size() ? decimal : binary;
}

std::string detail::approximate_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + " B";
  }
  double value = static_cast<double>(bytes) / kKibi;
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= kKibi;
    ++unit;
  }
  std::array<char, 32> text{};
  const int decimals = value < 10.0 ? 2 : (value < 100.0 ? 1 : 0);
  std::snprintf(text.data(), text.size(), "%.*f %s", decimals, value, kUnits[unit]);
  return text.data();
}

std::string exact_number(double value) {
  std::array<char, 32> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? std::string(text.data(), end) : std::string("?");
}

}  // namespace tessera
