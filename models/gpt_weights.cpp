#include "models/gpt_weights.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "models/element_convert.h"
#include "models/gpt_shapes.h"
#include "models/name_list.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

using checkpoint::TensorEntry;
using nlohmann::json;

// For what a file has in another type or order. The more of a transposed tensor it holds, the
// longer are the runs that are read: all of it up to the largest layer of GPT-2's.
constexpr std::size_t kStagingBytes = std::size_t{64} << 20;
constexpr std::size_t kMostConfigBytes = std::size_t{1} << 20;

// Conventions of a config.json that shapes do not show.
class ConfigCheck {
 public:
  ConfigCheck(const json& config, const GptOptions& options) : config_(config), options_(options) {}

  // Every difference; empty: none.
  std::string differences() {
    check_heads();
    check_activation();
    check_constants();
    return text_;
  }

 private:
  const json* find(const char* key) const {
    const auto found = config_.find(key);
    return found == config_.end() || found->is_null() ? nullptr : &*found;
  }
  std::string text(const char* key) const {
    const json* const value = find(key);
    return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
  }
  static std::string shown(const json& value) {
    return printable(value.dump(-1, ' ', true, json::error_handler_t::replace), 40);
  }
  void add(const char* key, const json& value, const std::string& ours) {
    text_ += detail::concat(text_.empty() ? "" : "; ", key, " is ", shown(value), ", ", ours);
  }

  void check_heads() {
    for (const char* const key : {"n_head", "num_attention_heads"}) {
      const json* const heads = find(key);
      if (heads != nullptr && *heads != options_.heads) {
        add(key, *heads, detail::concat("here ", options_.heads, " (--heads)"));
      }
    }
  }

  void check_activation() {
    const json* const activation = find("activation_function");
    const std::string name = text("activation_function");
    const bool is_tanh = is_tanh_gelu(name, activation == nullptr ? text("model_type") : "");
    if (activation != nullptr && !is_tanh && name != "gelu") {
      add("activation_function", *activation, "our GPT has gelu and gelu_new");
    } else if ((activation != nullptr || is_tanh) && is_tanh != options_.gelu_tanh) {
      add("activation_function", activation != nullptr ? *activation : json("gelu_new"),
          detail::concat("the model is made with ", options_.gelu_tanh ? "gelu_new" : "gelu",
                         " (--model with this file takes it from there)"));
    }
  }

  void check_constants() {
    const json* const epsilon = find("layer_norm_epsilon");
    if (epsilon != nullptr && *epsilon != kGptNormEps) {
      add("layer_norm_epsilon", *epsilon, detail::concat("our GPT's is ", kGptNormEps));
    }
    const std::pair<const char*, bool> switches[] = {{"scale_attn_weights", true},
                                                     {"scale_attn_by_inverse_layer_idx", false},
                                                     {"add_cross_attention", false}};
    for (const auto& [key, needed] : switches) {
      const json* const value = find(key);
      if (value != nullptr && *value != needed) {
        add(key, *value, detail::concat("our GPT computes ", needed ? "true" : "false"));
      }
    }
  }

  const json& config_;
  const GptOptions& options_;
  std::string text_;
};

void check_config(const std::string& folder, const GptOptions& options) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    return;
  }
  const json config = json::parse(read_small_file(path, kMostConfigBytes), nullptr,
                                  /*allow_exceptions=*/false);
  TESSERA_CHECK(config.is_object(), CorruptError, printable(path, 400), ": not a JSON object");
  const std::string differences = ConfigCheck(config, options).differences();
  TESSERA_CHECK(differences.empty(), ConfigError, printable(path, 400),
                ": these weights are for another computation than this model's: ", differences);
}

struct Naming {
  GptNaming names = GptNaming::kTessera;
  std::string prefix;
};

Naming naming_of(const SafetensorsSet& set) {
  const auto has = [&](const std::string& name) { return set.tensors().count(name) == 1; };
  if (has("tokens.weight")) {
    return {};
  }
  for (const char* const prefix : {kGpt2Prefix, ""}) {
    if (has(std::string(prefix) + "wte.weight")) {
      return {GptNaming::kGpt2, prefix};
    }
  }
  NameList first("its tensors are");
  for (const auto& [name, entry] : set.tensors()) {
    first.add(in_quotes(name, 60));
  }
  throw ConfigError(
      detail::concat(printable(set.path(), 400),
                     ": holds no table of tokens, neither under our name "
                     "(tokens.weight) nor under GPT-2's (wte.weight); ",
                     set.tensors().empty() ? std::string("it has no tensors") : first.text()));
}

}  // namespace

InitialWeights::InitialWeights(const std::string& path, const GptOptions& options) : set_(path) {
  const Naming naming = naming_of(set_);
  find_params(options, naming.names, naming.prefix);
  check_config(set_.folder(), options);
  summary_ = detail::concat(naming.names == GptNaming::kGpt2 ? "GPT-2's" : "our", " names, ",
                            set_.num_files(), " file",
                            plural(static_cast<std::int64_t>(set_.num_files())));
}

void InitialWeights::find_params(const GptOptions& options, GptNaming naming,
                                 const std::string& prefix) {
  NameList missing("missing are");
  NameList misshapen("of other shapes are");
  NameList other_types("of other types than fp32, bf16 and fp16 are");
  NameList extra("not in the model are");
  std::set<std::string> known;
  const auto& tensors = set_.tensors();
  const bool has_adapters = naming == GptNaming::kTessera &&
                            std::any_of(tensors.begin(), tensors.end(),
                                        [](const auto& each) { return is_adapter(each.first); });
  for (const ParamShape& param : gpt_shape(options).params) {
    if (is_adapter(param.name) && !has_adapters) {
      continue;
    }
    const FileTensor tensor = file_tensor(naming, prefix, param.name, param.sizes);
    known.insert(tensor.name);
    const auto found = set_.tensors().find(tensor.name);
    if (found == set_.tensors().end()) {
      missing.add(in_quotes(tensor.name));
      continue;
    }
    const TensorEntry& entry = found->second;
    if (entry.shape != tensor.sizes) {
      misshapen.add(detail::concat(in_quotes(tensor.name), " ", sizes_text(entry.shape), ", here ",
                                   sizes_text(tensor.sizes)));
    } else if (entry.dtype != DType::kFloat32 && entry.dtype != DType::kBFloat16 &&
               entry.dtype != DType::kFloat16) {
      other_types.add(detail::concat(in_quotes(tensor.name), " ", to_string(entry.dtype)));
    }
    places_[param.name] = {tensor, entry.dtype};
  }
  const std::string tokens = file_tensor(naming, prefix, "tokens.weight", {}).name;
  const std::string head = file_tensor(naming, prefix, "head.weight", {}).name;
  const bool has_head = set_.tensors().count(head) == 1;
  for (const auto& [name, entry] : set_.tensors()) {
    const bool is_tied_head = options.tie_head && name == head;
    const bool is_mask = naming == GptNaming::kGpt2 && is_gpt2_mask(name);
    if (known.count(name) == 0 && !is_tied_head && !is_mask) {
      extra.add(in_quotes(name));
    }
  }
  const std::string problems = joined({missing, misshapen, other_types, extra});
  TESSERA_CHECK(problems.empty(), ConfigError, printable(set_.path(), 400),
                ": these are not weights of this model: ", problems,
                "; give the model that they "
                "belong to: --model config.json, or --width, --layers, --vocab and --seq",
                !has_head && !options.tie_head ? ", and --tie-head, since they have no head" : "",
                has_adapters && options.adapter_rank == 0
                    ? ", and --adapters R, since they have adapters"
                    : "");
  if (options.tie_head && has_head) {
    check_tied_head(tokens, head);
  }
}

// Some programs write both names of a tied weight. They must be one.
void InitialWeights::check_tied_head(const std::string& tokens, const std::string& head) const {
  const TensorEntry& of_tokens = set_.tensors().at(tokens);
  const TensorEntry& of_head = set_.tensors().at(head);
  bool is_same = of_tokens.shape == of_head.shape && of_tokens.dtype == of_head.dtype;
  std::vector<std::byte> first(std::min(of_tokens.bytes(), kStagingBytes / 2));
  std::vector<std::byte> second(first.size());
  for (std::size_t begin = 0; is_same && begin < of_tokens.bytes(); begin += first.size()) {
    const std::size_t bytes = std::min(first.size(), of_tokens.bytes() - begin);
    set_.read(tokens, begin, std::span(first).first(bytes));
    set_.read(head, begin, std::span(second).first(bytes));
    is_same = std::memcmp(first.data(), second.data(), bytes) == 0;
  }
  TESSERA_CHECK(is_same, ConfigError, printable(set_.path(), 400), ": ", in_quotes(head),
                " has other values than ", in_quotes(tokens),
                ", and the model's head is tied; leave --tie-head out");
}

void InitialWeights::read(const std::string& name, shard::ElementRange range, DType dtype,
                          std::byte* out) const {
  const auto found = places_.find(name);
  TESSERA_INVARIANT(found != places_.end(), "weights were opened for another model: parameter ",
                    in_quotes(name));
  const Place& place = found->second;
  if (place.tensor.is_transposed) {
    read_transposed(place, range, dtype, out);
    return;
  }
  const std::size_t bytes = bytes_of(place.dtype);
  const std::size_t out_bytes = bytes_of(dtype);
  const auto begin = static_cast<std::size_t>(range.begin);
  const auto numel = static_cast<std::size_t>(range.numel);
  if (place.dtype == dtype) {
    set_.read(place.tensor.name, begin * bytes, {out, numel * bytes});
    return;
  }
  std::vector<std::byte> staging(std::min(numel * bytes, kStagingBytes));
  const std::size_t most = staging.size() / bytes;
  for (std::size_t done = 0; done < numel; done += most) {
    const std::size_t count = std::min(most, numel - done);
    const auto run = std::span(staging).first(count * bytes);
    set_.read(place.tensor.name, (begin + done) * bytes, run);
    convert_elements(place.dtype, run, dtype, out + done * out_bytes);
  }
}

// Ours is [rows, columns], the file's [columns, rows]: a band of our rows is a piece of each of the
// file's.
void InitialWeights::read_transposed(const Place& place, shard::ElementRange range, DType dtype,
                                     std::byte* out) const {
  if (range.numel == 0) {
    return;
  }
  const std::size_t bytes = bytes_of(place.dtype);
  const std::size_t out_bytes = bytes_of(dtype);
  const auto columns = static_cast<std::size_t>(place.tensor.sizes[0]);
  const auto rows = static_cast<std::size_t>(place.tensor.sizes[1]);
  const auto begin = static_cast<std::size_t>(range.begin);
  const std::size_t end = begin + static_cast<std::size_t>(range.numel);
  const std::size_t end_row = (end - 1) / columns + 1;
  const std::size_t most_rows = std::max<std::size_t>(kStagingBytes / (columns * bytes), 1);
  std::vector<std::byte> staging;
  std::vector<std::byte> line(columns * bytes);  // one row of ours
  for (std::size_t row = begin / columns; row < end_row;) {
    const std::size_t count = std::min(most_rows, end_row - row);
    staging.resize(columns * count * bytes);
    if (count == rows) {
      set_.read(place.tensor.name, 0, staging);
    } else {
      for (std::size_t column = 0; column < columns; ++column) {
        set_.read(place.tensor.name, (column * rows + row) * bytes,
                  std::span(staging).subspan(column * count * bytes, count * bytes));
      }
    }
    for (std::size_t in_band = 0; in_band < count; ++in_band, ++row) {
      for (std::size_t column = 0; column < columns; ++column) {
        std::memcpy(line.data() + column * bytes,
                    staging.data() + (column * count + in_band) * bytes, bytes);
      }
      const std::size_t from = std::max(begin, row * columns);
      const std::size_t to = std::min(end, (row + 1) * columns);
      convert_elements(place.dtype,
                       std::span(line).subspan((from - row * columns) * bytes, (to - from) * bytes),
                       dtype, out + (from - begin) * out_bytes);
    }
  }
}

std::shared_ptr<const InitialWeights> open_weights(const std::string& path,
                                                   const GptOptions& options) {
  return std::make_shared<const InitialWeights>(path, options);
}

}  // namespace tessera::models
