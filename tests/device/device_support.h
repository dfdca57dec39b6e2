// What tests of this folder share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "tessera/core/error.h"

namespace tessera::device {

inline bool holds(const std::byte* data, std::size_t bytes, std::uint8_t value) {
  return std::all_of(data, data + bytes, [value](std::byte b) { return b == std::byte{value}; });
}

// For many bytes: as fast as memory, whatever the compiler makes of a loop.
inline bool is_all(const unsigned char* data, std::size_t bytes, unsigned char value) {
  return bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0);
}

inline std::exception_ptr io_error(const std::string& text) {
  return std::make_exception_ptr(IoError(text));
}

}  // namespace tessera::device
