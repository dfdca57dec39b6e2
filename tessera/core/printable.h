// Foreign text inside our messages: whatever a file, a flag or an environment variable holds, the
// message stays one line of printable ASCII of bounded length.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

// Control characters and non-ASCII bytes become \n, \t or \xNN; text longer than `max_length` is
// cut and ends in "...".
std::string printable(std::string_view text, std::size_t max_length = 120);

// printable() in double quotes.
std::string in_quotes(std::string_view text, std::size_t max_length = 120);

// ASCII letters only, whatever the locale.
std::string lower_case(std::string_view text);

// The ending of a noun that is counted: "", or "s".
inline const char* plural(std::int64_t count) { return count == 1 ? "" : "s"; }

}  // namespace tessera
