// How long a loop of a test is. Where a sanitizer checks every access, fewer rounds show all that
// it can see; the plain build has the rounds that compare numbers.
#pragma once

namespace tessera::support {

#ifdef TESSERA_SANITIZED
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

template <typename Count>
constexpr Count rounds(Count plain, Count sanitized) {
  return kIsSanitized ? sanitized : plain;
}

}  // namespace tessera::support
