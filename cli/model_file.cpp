#include "cli/model_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

#include <nlohmann/json.hpp>

#include "models/gpt_names.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using Names = std::initializer_list<const char*>;

constexpr std::size_t kMostBytes = std::size_t{1} << 20;
constexpr double kNormEps = 1e-5;

// Feed-forwards of these are gated: three matrices in place of two, whatever the file says.
constexpr std::array<std::string_view, 11> kGatedTypes = {"llama", "mistral", "mixtral", "qwen2",
                                                          "qwen3", "gemma",   "gemma2",  "gemma3",
                                                          "phi3",  "olmo",    "cohere"};

class Reader {
 public:
  Reader(const json& file, std::string name) : file_(file), name_(std::move(name)) {}

  // The first that is there and not null.
  const json* find(Names names) const {
    for (const char* const name : names) {
      const auto found = file_.find(name);
      if (found != file_.end() && !found->is_null()) {
        return &*found;
      }
    }
    return nullptr;
  }

  std::optional<std::int64_t> count(Names names) const {
    const json* const value = find(names);
    if (value == nullptr) {
      return std::nullopt;
    }
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const bool is_count = value->is_number_integer() && *value >= 1 && *value <= kMost;
    TESSERA_CHECK(is_count, ConfigError, name_, ": ", alternatives(names), " is ", shown(*value),
                  ", not a whole number from 1 to ", kMost);
    return value->get<std::int64_t>();
  }

  std::int64_t needed_count(const char* what, Names names, const char* flag) const {
    const std::optional<std::int64_t> value = count(names);
    TESSERA_CHECK(value, ConfigError, name_, " does not say the ", what, " (", alternatives(names),
                  "); is it the config.json of a GPT? Else use --preset and ", flag);
    return *value;
  }

  // Empty: not there.
  std::string text(Names names) const {
    const json* const value = find(names);
    return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
  }
  double number(Names names, double otherwise) const {
    const json* const value = find(names);
    return value != nullptr && value->is_number() ? value->get<double>() : otherwise;
  }

  const std::string& name() const { return name_; }

  static std::string shown(const json& value) {
    return printable(value.dump(-1, ' ', true, json::error_handler_t::replace), 100);
  }

 private:
  static std::string alternatives(Names names) {
    std::string text;
    for (const char* const name : names) {
      text.append(text.empty() ? "" : " or ").append(name);
    }
    return text;
  }

  const json& file_;
  const std::string name_;
};

bool is_gated(const Reader& reader) {
  const std::string type = reader.text({"model_type"});
  const std::string act = reader.text({"hidden_act", "activation_function"});
  return std::find(kGatedTypes.begin(), kGatedTypes.end(), type) != kGatedTypes.end() ||
         act == "silu" || act == "swish" || act.find("glu") != std::string::npos;
}

// All reasons at once: whoever mends one should not meet the next.
void refuse_other_shapes(const Reader& reader, const ModelFile& model) {
  std::string reasons;
  const auto add = [&reasons](const std::string& reason) {
    reasons.append(reasons.empty() ? "" : "; ").append(reason);
  };
  const auto kv_heads = reader.count({"num_key_value_heads", "num_kv_heads", "n_head_kv"});
  if (kv_heads.value_or(model.heads) != model.heads) {
    add(detail::concat("num_key_value_heads is ", *kv_heads, " for ", model.heads,
                       " heads: grouped heads have smaller matrices"));
  }
  const auto head_size = reader.count({"head_dim"});
  if (head_size && *head_size * model.heads != model.width) {
    add(detail::concat("head_dim is ", *head_size, ", and ", model.heads, " heads of a width of ",
                       model.width, " have ", model.width / model.heads));
  }
  const auto inner = reader.count({"n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size"});
  if (is_gated(reader)) {
    add(detail::concat("the feed-forward is gated (SwiGLU or the like",
                       inner ? detail::concat(", intermediate_size ", *inner) : std::string(),
                       "): three matrices, here there are two"));
  } else if (inner && *inner != 4 * model.width) {
    add(detail::concat("the feed-forward is ", *inner,
                       " wide, here it is 4 times the width: ", 4 * model.width));
  }
  if (const auto experts = reader.count({"num_local_experts", "num_experts", "n_routed_experts"})) {
    add(detail::concat(*experts, " experts, here there are none"));
  }
  TESSERA_CHECK(
      reasons.empty(), ConfigError, reader.name(), " has other shapes than our GPT: ", reasons,
      ". To train a GPT of about this size: --width ", model.width, " --heads ", model.heads,
      " --layers ", model.layers, " --vocab ", model.vocabulary, " and --seq N");
}

std::vector<std::string> notes_of(const Reader& reader) {
  std::vector<std::string> notes;
  const auto add = [&](const std::string& note) { notes.push_back(reader.name() + ": " + note); };
  const std::string act = reader.text({"activation_function", "hidden_act"});
  if (!act.empty() && act != "gelu" && !models::is_tanh_gelu(act, "")) {
    add("activation " + printable(act, 40) + " becomes gelu, the exact one");
  }
  const bool is_rotary = reader.find({"rope_theta", "rotary_dim", "rotary_pct", "rope_scaling",
                                      "rotary_emb_base", "partial_rotary_factor"}) != nullptr ||
                         reader.text({"position_embedding_type"}) == "rotary";
  if (is_rotary) {
    add("rotary positions become learned ones, which are parameters");
  }
  if (reader.find({"rms_norm_eps"}) != nullptr) {
    add("RMS norms become layer norms with a bias");
  }
  const double eps = reader.number({"layer_norm_epsilon", "layer_norm_eps"}, kNormEps);
  if (eps != kNormEps) {
    add(detail::concat("the layer norms' epsilon ", eps, " becomes ", kNormEps));
  }
  double dropout = 0;
  for (const char* const name : {"resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
                                 "hidden_dropout", "attention_dropout"}) {
    dropout = std::max(dropout, reader.number({name}, 0));
  }
  if (dropout > 0) {
    add(detail::concat("dropout of up to ", dropout, " is left out: our GPT has none"));
  }
  return notes;
}

}  // namespace

ModelFile parse_model_file(const std::string& text, const std::string& name) {
  const json file = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const std::string quoted = "--model " + tessera::in_quotes(name);
  TESSERA_CHECK(file.is_object(), ConfigError, quoted,
                " is not a JSON object; name the config.json of a model");
  const Reader reader(file, quoted);
  ModelFile model;
  model.width = reader.needed_count("width", {"n_embd", "hidden_size", "d_model"}, "--width");
  model.layers =
      reader.needed_count("number of layers", {"n_layer", "num_hidden_layers"}, "--layers");
  model.heads =
      reader.needed_count("number of heads", {"n_head", "num_attention_heads"}, "--heads");
  model.vocabulary = reader.needed_count("size of the vocabulary", {"vocab_size"}, "--vocab");
  model.positions = reader.count({"n_positions", "max_position_embeddings", "n_ctx"});
  refuse_other_shapes(reader, model);
  model.notes = notes_of(reader);

  const std::string type = reader.text({"model_type"});
  const json* const tied = reader.find({"tie_word_embeddings"});
  TESSERA_CHECK(tied == nullptr || tied->is_boolean(), ConfigError, quoted,
                ": tie_word_embeddings is ", Reader::shown(*tied), ", not true or false");
  model.gelu_tanh = models::is_tanh_gelu(reader.text({"activation_function", "hidden_act"}), type);
  model.tie_head = tied != nullptr ? tied->get<bool>() : type == "gpt2";
  return model;
}

ModelFile read_model_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string quoted = "--model " + tessera::in_quotes(path);
  TESSERA_CHECK(file, ConfigError, quoted,
                " cannot be opened: ", std::generic_category().message(errno),
                "; name the config.json of a model");
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  TESSERA_CHECK(!file.bad() && !text.empty(), ConfigError, quoted,
                " cannot be read, or is empty; name the config.json of a model");
  TESSERA_CHECK(text.size() <= kMostBytes, ConfigError, quoted, " is larger than ", kMostBytes,
                " bytes; name the config.json of a model");
  return parse_model_file(text, path);
}

}  // namespace tessera::cli
