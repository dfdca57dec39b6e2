#include "tessera/core/printable.h"

namespace tessera {

std::string printable(std::string_view text, std::size_t max_length) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string result;
  for (const char c : text) {
    if (result.size() >= max_length) {
      return result + "...";
    }
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      result += "\\n";
    } else if (c == '\t') {
      result += "\\t";
    } else if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      result += "\\x";
      result += kHex[byte >> 4];
      result += kHex[byte & 0xfU];
    }
  }
  return result;
}

std::string in_quotes(std::string_view text, std::size_t max_length) {
  return '"' + printable(text, max_length) + '"';
}

std::string lower_case(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = (c >= 'A' && c <= 'Z') ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return result;
}

}  // namespace tessera
