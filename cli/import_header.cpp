#include "cli/import_header.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr std::uint64_t kMostHeaderBytes = std::uint64_t{256} << 20;
constexpr std::size_t kMostDims = 64;
constexpr std::array<std::string_view, 4> kTensorNames = {"value", "master", "exp_avg",
                                                          "exp_avg_sq"};

[[noreturn]] void refuse(const std::string& what) {
  throw CorruptError("import: the reader's header is wrong: " + what +
                     "; is --python a Python of its own?");
}

// The fields of one object, each of the type that it must have.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) {
      refuse(where_ + " is no object");
    }
  }

  const std::string& text(const char* key) const {
    const json& value = find(key);
    check(value.is_string(), key, "a text");
    return value.get_ref<const std::string&>();
  }
  std::int64_t count(const char* key) const {
    const json& value = find(key);
    check(is_count(value), key, "a whole number of at least 0");
    return value.get<std::int64_t>();
  }
  double number(const char* key) const {
    const json& value = find(key);
    check(value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= 0, key,
          "a number of at least 0");
    return value.get<double>();
  }
  bool flag(const char* key) const {
    const json& value = find(key);
    check(value.is_boolean(), key, "true or false");
    return value.get<bool>();
  }
  const json& list(const char* key) const {
    const json& value = find(key);
    check(value.is_array(), key, "a list");
    return value;
  }
  Fields object(const char* key) const { return Fields(find(key), where_ + ": " + key); }
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> all;
    for (const json& value : list(key)) {
      check(value.is_string(), key, "a list of texts");
      all.push_back(value.get<std::string>());
    }
    return all;
  }
  std::vector<std::int64_t> shape() const {
    const json& dims = list("shape");
    check(dims.size() <= kMostDims && std::all_of(dims.begin(), dims.end(), is_count), "shape",
          "a list of at most 64 dims");
    return dims.get<std::vector<std::int64_t>>();
  }
  DType dtype(const char* key) const { return dtype_called(text(key)); }
  DType dtype_called(const std::string& name) const {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64,
                              DType::kInt64, DType::kInt32, DType::kUInt8}) {
      if (to_string(dtype) == name) {
        return dtype;
      }
    }
    refuse(where_ + " has the type " + in_quotes(name, 40));
  }
  const std::string& where() const { return where_; }

 private:
  static bool is_count(const json& value) {
    return value.is_number_unsigned() &&
           value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
  }
  const json& find(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) {
      refuse(where_ + " has no " + key);
    }
    return *found;
  }
  void check(bool good, const char* key, const char* wanted) const {
    if (!good) {
      refuse(where_ + ": " + key + " is not " + wanted);
    }
  }

  const json& object_;
  const std::string where_;
};

// That its bytes can be counted.
std::int64_t bytes_of_tensor(const std::string& name, DType dtype,
                             const std::vector<std::int64_t>& shape) {
  std::size_t bytes = 0;
  try {
    bytes = checkpoint::TensorEntry{name, dtype, shape}.bytes();
  } catch (const ConfigError& error) {
    refuse(error.what());
  }
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
    refuse(in_quotes(name) + " has more bytes than a number holds");
  }
  return static_cast<std::int64_t>(bytes);
}

bool is_param_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

ImportedTensor tensor_of(const Fields& param, const json& pair) {
  if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) {
    refuse(param.where() + ": a tensor is not name and type");
  }
  ImportedTensor tensor{pair[0].get<std::string>(), param.dtype_called(pair[1].get<std::string>())};
  if (std::find(kTensorNames.begin(), kTensorNames.end(), tensor.name) == kTensorNames.end()) {
    refuse(param.where() + " has the tensor " + in_quotes(tensor.name, 40));
  }
  const bool fits =
      tensor.name == "value" ? is_param_dtype(tensor.dtype) : tensor.dtype == DType::kFloat32;
  if (!fits) {
    refuse(detail::concat(param.where(), ": its ", tensor.name, " is ", to_string(tensor.dtype)));
  }
  return tensor;
}

void add_name(std::set<std::string>& names, const std::string& name) {
  if (name.empty() || !names.insert(name).second) {
    refuse("the name " + in_quotes(name) + " is empty, or comes twice");
  }
}

ImportedParam param_of(const json& entry, std::set<std::string>& names) {
  const Fields fields(entry, "a parameter");
  ImportedParam param;
  param.name = fields.text("name");
  add_name(names, param.name);
  param.tied = fields.texts("tied");
  for (const std::string& name : param.tied) {
    add_name(names, name);
  }
  param.shape = fields.shape();
  param.trainable = fields.flag("trainable");
  param.updates = fields.count("updates");
  std::set<std::string> kinds;
  for (const json& pair : fields.list("tensors")) {
    param.tensors.push_back(tensor_of(fields, pair));
    add_name(kinds, param.tensors.back().name);
    bytes_of_tensor(param.name, param.tensors.back().dtype, param.shape);
  }
  if (!kinds.contains("value")) {
    refuse("parameter " + in_quotes(param.name) + " has no value");
  }
  return param;
}

ImportedBuffer buffer_of(const json& entry, std::set<std::string>& names) {
  const Fields fields(entry, "a buffer");
  ImportedBuffer buffer;
  buffer.name = fields.text("name");
  add_name(names, buffer.name);
  buffer.shape = fields.shape();
  buffer.dtype = fields.dtype("dtype");
  buffer.type = fields.text("type");
  const std::int64_t bytes = fields.count("bytes");
  const std::int64_t elements = bytes_of_tensor(buffer.name, DType::kUInt8, buffer.shape);
  const bool fits = buffer.type.empty()
                        ? bytes == bytes_of_tensor(buffer.name, buffer.dtype, buffer.shape)
                        : buffer.dtype == DType::kUInt8 && elements > 0 && bytes % elements == 0;
  if (!fits) {
    refuse(detail::concat("buffer ", in_quotes(buffer.name), " has ", bytes, " bytes for ",
                          elements, " elements"));
  }
  buffer.numel = bytes / static_cast<std::int64_t>(bytes_of(buffer.dtype));
  return buffer;
}

}  // namespace

ImportHeader parse_import_header(std::string_view text) {
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Fields fields(parsed, "it");
  if (fields.count("version") != kVersion) {
    refuse(detail::concat("its version is ", fields.count("version"), ", not ", kVersion));
  }
  ImportHeader header;
  header.deepspeed = fields.text("deepspeed");
  header.num_ranks = fields.count("num_ranks");
  header.step = fields.count("step");
  header.num_updates = fields.count("num_updates");
  header.precision = fields.dtype("precision");
  if (!is_param_dtype(header.precision)) {
    refuse(detail::concat("its precision is ", to_string(header.precision)));
  }
  const Fields optimizer = fields.object("optimizer");
  header.optimizer = optimizer.text("kind");
  if (header.optimizer != "adamw" && header.optimizer != "adam") {
    refuse("its optimizer is " + in_quotes(header.optimizer, 40));
  }
  for (const json& entry : optimizer.list("groups")) {
    const Fields group(entry, "a group");
    header.groups.push_back({group.number("lr"), group.number("beta1"), group.number("beta2"),
                             group.number("eps"), group.number("weight_decay")});
  }
  const Fields scale = fields.object("loss_scale");
  header.loss_scale = scale.number("value");
  header.good_steps = scale.count("good_steps");
  header.hysteresis_left = scale.count("hysteresis_left");
  header.lr_scheduler = fields.text("lr_scheduler");
  header.client_state = fields.text("client_state");
  header.notes = fields.texts("notes");
  std::set<std::string> param_names;
  for (const json& entry : fields.list("params")) {
    header.params.push_back(param_of(entry, param_names));
    const std::int64_t numel =
        bytes_of_tensor(header.params.back().name, DType::kUInt8, header.params.back().shape);
    if (__builtin_add_overflow(header.num_elements, numel, &header.num_elements)) {
      refuse("its parameters have more elements than a number holds");
    }
  }
  std::set<std::string> buffer_names;
  for (const json& entry : fields.list("buffers")) {
    header.buffers.push_back(buffer_of(entry, buffer_names));
  }
  return header;
}

ImportHeader read_import_header(const ReadBytes& read) {
  std::array<std::byte, 8> length{};
  read(length);
  std::uint64_t bytes = 0;
  for (std::size_t i = length.size(); i-- > 0;) {
    bytes = bytes << 8 | std::to_integer<std::uint64_t>(length[i]);
  }
  if (bytes > kMostHeaderBytes) {
    refuse(detail::concat("its length is ", bytes, " bytes"));
  }
  std::string text(bytes, '\0');
  read(std::as_writable_bytes(std::span(text)));
  return parse_import_header(text);
}

}  // namespace tessera::cli
