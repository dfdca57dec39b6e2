// Whether a message says what it should.
#pragma once

#include <string>

namespace tessera {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera
