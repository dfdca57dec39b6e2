// The header of a safetensors file, between bytes and entries; internal to checkpoint.
//
// Pure: no file is touched, a path only names the file in errors.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

inline constexpr std::size_t kLengthBytes = 8;  // little-endian, before the JSON
// The reference implementation's limit: more is an attack or a mistake, not a model.
inline constexpr std::uint64_t kMaxJsonBytes = 100'000'000;
// Of sizes and places in files and tensors, which are signed in other programs.
inline constexpr std::uint64_t kMaxNumber = std::numeric_limits<std::int64_t>::max();
inline constexpr std::size_t kMaxDims = 64;  // as in torch and numpy

// "F32" and so on; nothing for a name of none of our types.
std::string_view type_name(DType dtype);
std::optional<DType> type_named(std::string_view name);

// For messages, cut where it is long.
std::string shape_text(const std::vector<std::int64_t>& shape);

struct PlacedTensor {
  TensorEntry entry;
  std::uint64_t begin = 0;  // of its bytes, counted from the end of the header
};

struct SafetensorsHeader {
  std::vector<PlacedTensor> tensors;  // by begin
  std::map<std::string, std::string> metadata;
};

// Length, JSON, and spaces up to a multiple of 8 bytes; tensors lie one after the other in the
// order given. Throws ConfigError for what the format cannot say.
std::string format_header(const std::vector<TensorEntry>& entries,
                          const std::map<std::string, std::string>& metadata);

// For tensors that are written in an order that is not known yet: bytes of a header, a multiple of
// `step`, that are enough whichever it is. Throws as above.
std::uint64_t header_room(const std::vector<TensorEntry>& entries, std::uint64_t step);
// The header that fills exactly that room. `tensors` by begin. REQUIRES: it is enough.
std::string format_header(const std::vector<PlacedTensor>& tensors, std::uint64_t room);

// The length field. Throws CorruptError if no file of `file_bytes` can have such a header.
std::uint64_t parse_length(std::span<const unsigned char, kLengthBytes> field,
                           std::uint64_t file_bytes, const std::string& path);

// Throws CorruptError unless the tensors fill `data_bytes` without gap or overlap.
SafetensorsHeader parse_header(std::string_view json, std::uint64_t data_bytes,
                               const std::string& path);

}  // namespace tessera::checkpoint
