// Copies and fills between places that the host can address, with the checks of device.h.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "tessera/core/error.h"

namespace tessera::device {

// std::less orders pointers into different objects; the built-in comparison need not.
inline bool ranges_overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto* const a_start = static_cast<const std::byte*>(a);
  const auto* const b_start = static_cast<const std::byte*>(b);
  const std::less<const std::byte*> before;
  return a_bytes > 0 && b_bytes > 0 && before(a_start, b_start + b_bytes) &&
         before(b_start, a_start + a_bytes);
}

inline void check_copy(const void* to, const void* from, std::size_t bytes) {
  TESSERA_INVARIANT(bytes == 0 || (to != nullptr && from != nullptr), "copy of ", bytes,
                    " bytes from ", from, " to ", to);
  TESSERA_INVARIANT(!ranges_overlap(to, bytes, from, bytes), "copy of ", bytes, " bytes from ",
                    from, " to ", to, ": the ranges overlap");
}

inline void check_fill(const void* to, std::size_t bytes) {
  TESSERA_INVARIANT(bytes == 0 || to != nullptr, "fill of ", bytes, " bytes at null");
}

// memcpy and memset with null pointers are undefined even for zero bytes.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

inline void fill_bytes(void* to, std::uint8_t value, std::size_t bytes) {
  if (bytes > 0) {
    std::memset(to, value, bytes);
  }
}

}  // namespace tessera::device
