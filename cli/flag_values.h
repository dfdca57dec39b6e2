// Values of flags that are not options: counts, numbers and lists of sizes.
//
// Every failure is a one-line ConfigError: the flag, the value, what is allowed.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/dtype.h"

namespace tessera::cli {

std::int64_t parse_count(std::string_view flag, std::string_view text, std::int64_t min,
                         std::int64_t max);

// Finite and above zero.
double parse_positive(std::string_view flag, std::string_view text);

// fp32, bf16 or fp16.
DType parse_precision(std::string_view flag, std::string_view text);
// Seconds above 0: "30s", "45min", "2h". Here "m" are minutes: nobody ends a run after
// milliseconds.
double parse_duration(std::string_view flag, std::string_view text);

// Bytes per second, at least one: "300GB", "12.5GiB/s".
double parse_rate(std::string_view flag, std::string_view text);

// "4KiB,1MiB": at least one, each at least one byte.
std::vector<std::size_t> parse_sizes(std::string_view flag, std::string_view text);

}  // namespace tessera::cli
