#include "tessera/checkpoint/safetensors_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

constexpr std::string_view kMetadataName = "__metadata__";
constexpr std::string_view kDamaged =
    "the file is damaged or was cut short; write or copy it again";

constexpr std::array<std::pair<std::string_view, DType>, 7> kTypeNames = {{
    {"F32", DType::kFloat32},
    {"BF16", DType::kBFloat16},
    {"F16", DType::kFloat16},
    {"F64", DType::kFloat64},
    {"I64", DType::kInt64},
    {"I32", DType::kInt32},
    {"U8", DType::kUInt8},
}};

// Nothing where the product, from left to right, is not a number of bytes that an int64 holds.
std::optional<std::uint64_t> byte_count(const TensorEntry& entry) {
  std::uint64_t bytes = bytes_of(entry.dtype);
  for (const std::int64_t dim : entry.shape) {
    if (dim < 0 || (dim > 0 && bytes > kMaxNumber / static_cast<std::uint64_t>(dim))) {
      return std::nullopt;
    }
    bytes *= static_cast<std::uint64_t>(dim);
  }
  return bytes;
}

std::string json_string(std::string_view text, std::string_view what) {
  try {
    return json(text).dump();
  } catch (const json::exception&) {
    throw ConfigError(
        detail::concat(what, " ", tessera::in_quotes(text), " is not UTF-8, as safetensors needs"));
  }
}

// Takes the JSON apart as it comes, so that a hostile header costs no more memory than its tensors.
class HeaderParser : public nlohmann::json_sax<json> {
 public:
  HeaderParser(const std::string& path, std::uint64_t data_bytes)
      : path_(printable(path, 400)), data_bytes_(data_bytes) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_float(double, const std::string& text) override {
    return refuse("the number " + printable(text, 40));
  }
  bool binary(json::binary_t&) override { return refuse("binary data"); }

  bool number_integer(std::int64_t value) override {
    return refuse("the negative number " + std::to_string(value));
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) {
      return refuse("the number " + std::to_string(value));
    }
    TESSERA_CHECK(value <= kMaxNumber, CorruptError, where(), "the number ", value, " in ", field_,
                  " is too large; ", kDamaged);
    if (place_ == Place::kShape) {
      TESSERA_CHECK(tensor_.entry.shape.size() < kMaxDims, CorruptError, where(),
                    "shape has more than ", kMaxDims, " dims; ", kDamaged);
      tensor_.entry.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      TESSERA_CHECK(offsets_.size() < 2, CorruptError, where(),
                    "data_offsets has more than two numbers; ", kDamaged);
      offsets_.push_back(value);
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      TESSERA_CHECK(header_.metadata.emplace(field_, value).second, CorruptError, where(), "key ",
                    tessera::in_quotes(field_), " comes twice; ", kDamaged);
      return true;
    }
    if (place_ != Place::kTensor || field_ != "dtype") {
      return refuse("the text " + tessera::in_quotes(value, 40));
    }
    const auto dtype = type_named(value);
    TESSERA_CHECK(dtype.has_value(), CorruptError, where(), "dtype ", tessera::in_quotes(value, 40),
                  " is not known; F32, BF16, F16, F64, I64, I32 and U8 can be read");
    tensor_.entry.dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kNames;
    } else if (place_ == Place::kNames) {
      place_ = name_ == kMetadataName ? Place::kMetadata : Place::kTensor;
      tensor_ = {{name_, DType::kFloat32, {}}, 0};
      offsets_.clear();
      fields_.clear();
    } else {
      return refuse("an object");
    }
    return true;
  }

  bool key(std::string& value) override {
    if (place_ == Place::kNames) {
      name_ = value;
      TESSERA_CHECK(names_.insert(value).second, CorruptError, where(), "the name comes twice; ",
                    kDamaged);
      return true;
    }
    field_ = value;
    if (place_ == Place::kTensor) {
      TESSERA_CHECK(value == "dtype" || value == "shape" || value == "data_offsets", CorruptError,
                    where(), "unknown field ", tessera::in_quotes(value, 40),
                    "; only dtype, shape and data_offsets are known");
      TESSERA_CHECK(fields_.insert(value).second, CorruptError, where(), value, " comes twice; ",
                    kDamaged);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      add_tensor();
    }
    place_ = place_ == Place::kNames ? Place::kEnd : Place::kNames;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || field_ == "dtype") {
      return refuse("a list");
    }
    place_ = field_ == "shape" ? Place::kShape : Place::kOffsets;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    // The parser counts from one.
    throw CorruptError(detail::concat(path_, ": offset ", kLengthBytes + position - 1,
                                      ": the header cannot be read as JSON; ", kDamaged));
  }

 private:
  enum class Place : std::uint8_t { kStart, kNames, kMetadata, kTensor, kShape, kOffsets, kEnd };

  std::string where() const {
    return path_ +
           (name_ == kMetadataName ? ": " + name_ : ": tensor " + tessera::in_quotes(name_)) + ": ";
  }

  // Refuses what has no place here; this also bounds the depth.
  bool refuse(const std::string& what) const {
    TESSERA_CHECK(place_ != Place::kStart, CorruptError, path_, ": the header is ", what,
                  ", not a JSON object; ", kDamaged);
    throw CorruptError(
        detail::concat(where(), what, " where ", expected(), " belongs; ", kDamaged));
  }

  std::string expected() const {
    switch (place_) {
      case Place::kStart:
      case Place::kNames:
      case Place::kEnd:
        return "an object";
      case Place::kMetadata:
        return "text";
      case Place::kTensor:
        return field_ == "dtype" ? "the name of a type" : "a list of numbers";
      case Place::kShape:
      case Place::kOffsets:
        return "a whole number of " + field_;
    }
    return "nothing";
  }

  void add_tensor() {
    for (const char* const field : {"dtype", "shape", "data_offsets"}) {
      TESSERA_CHECK(fields_.count(field) > 0, CorruptError, where(), field, " is missing; ",
                    kDamaged);
    }
    TESSERA_CHECK(offsets_.size() == 2, CorruptError, where(), "data_offsets has ", offsets_.size(),
                  " numbers, not two; ", kDamaged);
    const std::uint64_t begin = offsets_[0], end = offsets_[1];
    TESSERA_CHECK(begin <= end && end <= data_bytes_, CorruptError, where(), "data_offsets [",
                  begin, ", ", end, "] do not lie in the ", data_bytes_,
                  " bytes after the header; ", kDamaged);
    const auto bytes = byte_count(tensor_.entry);
    TESSERA_CHECK(bytes.has_value(), CorruptError, where(), "shape ",
                  shape_text(tensor_.entry.shape), " has more bytes than a number holds; ",
                  kDamaged);
    TESSERA_CHECK(*bytes == end - begin, CorruptError, where(), type_name(tensor_.entry.dtype), " ",
                  shape_text(tensor_.entry.shape), " has ", *bytes, " bytes, data_offsets [", begin,
                  ", ", end, "] have ", end - begin, "; ", kDamaged);
    tensor_.begin = begin;
    header_.tensors.push_back(std::move(tensor_));
  }

  const std::string path_;
  const std::uint64_t data_bytes_;
  SafetensorsHeader header_;
  Place place_ = Place::kStart;
  std::string name_;
  std::string field_;
  std::set<std::string> names_;
  std::set<std::string> fields_;  // of this tensor
  PlacedTensor tensor_;
  std::vector<std::uint64_t> offsets_;
};

void check_coverage(const std::vector<PlacedTensor>& tensors, std::uint64_t data_bytes,
                    const std::string& path) {
  std::uint64_t covered = 0;
  for (const PlacedTensor& tensor : tensors) {
    TESSERA_CHECK(tensor.begin >= covered, CorruptError, path, ": tensor ",
                  tessera::in_quotes(tensor.entry.name), " begins at ", tensor.begin,
                  " of the data, inside the one before it, which ends at ", covered, "; ",
                  kDamaged);
    TESSERA_CHECK(tensor.begin == covered, CorruptError, path, ": bytes [", covered, ", ",
                  tensor.begin, ") of the data, before tensor ",
                  tessera::in_quotes(tensor.entry.name), ", belong to no tensor; ", kDamaged);
    covered += tensor.entry.bytes();
  }
  TESSERA_CHECK(covered == data_bytes, CorruptError, path, ": bytes [", covered, ", ", data_bytes,
                ") of the data, after the last tensor, belong to no tensor; ", kDamaged);
}

}  // namespace

std::string_view type_name(DType dtype) {
  const auto* const found =
      std::find_if(kTypeNames.begin(), kTypeNames.end(),
                   [dtype](const auto& pair) { return pair.second == dtype; });
  TESSERA_INVARIANT(found != kTypeNames.end(), "no safetensors name for ", to_string(dtype));
  return found->first;
}

std::optional<DType> type_named(std::string_view name) {
  const auto* const found = std::find_if(kTypeNames.begin(), kTypeNames.end(),
                                         [name](const auto& pair) { return pair.first == name; });
  return found == kTypeNames.end() ? std::nullopt : std::optional(found->second);
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t dim = 0; dim < shape.size() && dim < 8; ++dim) {
    text += (dim > 0 ? ", " : "") + std::to_string(shape[dim]);
  }
  return text + (shape.size() > 8 ? ", ...]" : "]");
}

std::size_t TensorEntry::bytes() const {
  const auto bytes = byte_count(*this);
  TESSERA_CHECK(bytes.has_value(), ConfigError, "tensor ", tessera::in_quotes(name), ": shape ",
                shape_text(shape), " has a negative dim, or more bytes than a number holds");
  return static_cast<std::size_t>(*bytes);
}

namespace {

// The JSON of tensors that lie where they say, without spaces behind it.
std::string format_json(const std::vector<PlacedTensor>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += '"' + std::string(kMetadataName) + "\":{";
    for (const auto& [key, value] : metadata) {
      text += (text.back() == '{' ? "" : ",") + json_string(key, "metadata key") + ':' +
              json_string(value, "metadata value");
    }
    text += '}';
  }
  std::set<std::string_view> names = {kMetadataName};
  for (const auto& [entry, begin] : tensors) {
    TESSERA_CHECK(names.insert(entry.name).second, ConfigError, "tensor ",
                  tessera::in_quotes(entry.name),
                  ": a safetensors file can hold the name only once",
                  entry.name == kMetadataName ? ", for the metadata" : "");
    text += (text.back() == '{' ? "" : ",") + json_string(entry.name, "tensor name");
    text += detail::concat(":{\"dtype\":\"", type_name(entry.dtype),
                           "\",\"shape\":", json(entry.shape).dump(), ",\"data_offsets\":[", begin,
                           ",", begin + entry.bytes(), "]}");
  }
  return text + '}';
}

// One after the other.
std::vector<PlacedTensor> place(const std::vector<TensorEntry>& entries) {
  std::vector<PlacedTensor> tensors;
  std::uint64_t begin = 0;
  for (const TensorEntry& entry : entries) {
    const std::uint64_t bytes = entry.bytes();
    TESSERA_CHECK(bytes <= kMaxNumber - begin, ConfigError, "tensor ",
                  tessera::in_quotes(entry.name), ": ", begin, " bytes before it and ", bytes,
                  " of its own are too many for one file");
    tensors.push_back({entry, begin});
    begin += bytes;
  }
  return tensors;
}

void check_json_bytes(std::uint64_t bytes) {
  TESSERA_CHECK(bytes <= kMaxJsonBytes, ConfigError, "a safetensors header of ", bytes,
                " bytes is more than readers accept (", kMaxJsonBytes,
                "); write fewer tensors or less metadata into one file");
}

// Spaces up to `json_bytes`, and the length before it.
std::string with_length(std::string json, std::uint64_t json_bytes) {
  json.append(json_bytes - json.size(), ' ');
  std::string field;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    field += static_cast<char>((json_bytes >> (8 * i)) & 0xffU);
  }
  return field + json;
}

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t step) {
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::string format_header(const std::vector<TensorEntry>& entries,
                          const std::map<std::string, std::string>& metadata) {
  std::string text = format_json(place(entries), metadata);
  const std::uint64_t json_bytes = rounded_up(text.size(), kLengthBytes);
  check_json_bytes(json_bytes);
  return with_length(std::move(text), json_bytes);
}

// No offset has more digits than the end of all tensors.
std::uint64_t header_room(const std::vector<TensorEntry>& entries, std::uint64_t step) {
  std::vector<PlacedTensor> tensors = place(entries);
  if (!tensors.empty()) {
    const std::uint64_t end = tensors.back().begin + tensors.back().entry.bytes();
    for (PlacedTensor& tensor : tensors) {
      tensor.begin = end;
    }
  }
  const std::uint64_t room = rounded_up(kLengthBytes + format_json(tensors, {}).size(), step);
  check_json_bytes(room - kLengthBytes);
  return room;
}

std::string format_header(const std::vector<PlacedTensor>& tensors, std::uint64_t room) {
  std::string text = format_json(tensors, {});
  TESSERA_INVARIANT(kLengthBytes + text.size() <= room, "a safetensors header of ",
                    kLengthBytes + text.size(), " bytes for which ", room, " were kept");
  return with_length(std::move(text), room - kLengthBytes);
}

std::uint64_t parse_length(std::span<const unsigned char, kLengthBytes> field,
                           std::uint64_t file_bytes, const std::string& path) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::uint64_t{field[i]} << (8 * i);
  }
  TESSERA_CHECK(length <= kMaxJsonBytes, CorruptError, printable(path, 400),
                ": offset 0: a header of ", length, " bytes, at most ", kMaxJsonBytes,
                " are allowed; this is no safetensors file, or it is damaged");
  TESSERA_CHECK(length <= file_bytes - kLengthBytes, CorruptError, printable(path, 400),
                ": offset 0: a header of ", length, " bytes in a file of ", file_bytes, "; ",
                kDamaged);
  return length;
}

SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes,
                               const std::string& path) {
  const std::string shown = printable(path, 400);
  TESSERA_CHECK(
      text.starts_with('{'), CorruptError, shown, ": offset ", kLengthBytes,
      ": the header does not begin with '{'; this is no safetensors file, or it is damaged");
  // The parser takes a NUL for the end of the text and would not look at what comes after it.
  const std::size_t nul = text.find('\0');
  TESSERA_CHECK(nul == text.npos, CorruptError, shown, ": offset ", kLengthBytes + nul,
                ": a NUL in the header; ", kDamaged);
  HeaderParser parser(path, data_bytes);
  const bool complete = json::sax_parse(text, &parser);
  TESSERA_INVARIANT(complete, "every refusal throws");
  SafetensorsHeader header = parser.take();
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const PlacedTensor& a, const PlacedTensor& b) {
                     // Tensors without bytes come before the one that begins at the same place.
                     return a.begin != b.begin ? a.begin < b.begin
                                               : a.entry.bytes() < b.entry.bytes();
                   });
  check_coverage(header.tensors, data_bytes, shown);
  return header;
}

}  // namespace tessera::checkpoint
