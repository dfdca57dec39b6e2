// Byte sizes and durations as people write them, and back.
//
// Parsing is exact or refused: "1.5GB" is 1500000000 B, "300MiB" is 314572800 B, a bare number is
// bytes or seconds. Units are not case sensitive.
//
// Threads: stateless.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// "" and anything that is not a whole, non-negative number of bytes below 2^63 gives nullopt.
// Suffixes: B, k/kB/KiB, M/MB/MiB, G/GB/GiB, T/TB/TiB (k, M, G, T alone are decimal).
std::optional<std::int64_t> parse_bytes(std::string_view text);

// Suffixes: us, ms, s, min, h. Negative and non-finite values give nullopt.
std::optional<double> parse_seconds(std::string_view text);

// A finite decimal number and nothing else, independent of the locale.
std::optional<double> parse_number(std::string_view text);

// Exact and readable by parse_bytes: "64KiB", "100MB", "4097B".
std::string exact_bytes(std::int64_t bytes);

// For people: three or four digits, "1.46 GiB". REQUIRES: bytes >= 0.
namespace detail {
std::string approximate_bytes(std::uint64_t bytes);
}  // namespace detail
template <std::integral Bytes>
std::string approximate_bytes(Bytes bytes) {
  return detail::approximate_bytes(static_cast<std::uint64_t>(bytes));
}

// The shortest text that parse_number turns into the same value: "0.1", "5e-05", "1e+30".
std::string exact_number(double value);

}  // namespace tessera
