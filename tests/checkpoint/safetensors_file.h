// Safetensors files made by hand, byte for byte, for tests of the reader and the writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace tessera::testing {

inline std::string length_field(std::uint64_t length) {
  std::string field;
  for (int i = 0; i < 8; ++i) {
    field += static_cast<char>((length >> (8 * i)) & 0xffU);
  }
  return field;
}

// A file with this header and as many bytes of data: 0, 1, 2, ...
inline std::string file_text(const std::string& header, std::size_t data_bytes) {
  std::string text = length_field(header.size()) + header;
  for (std::size_t i = 0; i < data_bytes; ++i) {
    text += static_cast<char>(i);
  }
  return text;
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace tessera::testing
