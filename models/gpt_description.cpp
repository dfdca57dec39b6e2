#include "models/gpt_description.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "models/gpt.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::models {
namespace {

constexpr std::string_view kPrefix = "model.";
constexpr const char* kTied = "model.tie_head";
constexpr const char* kGelu = "model.gelu";
constexpr const char* kType = "model.dtype";
constexpr const char* kAdapterRank = "model.adapter_rank";
constexpr const char* kAdapterAlpha = "model.adapter_alpha";

struct Count {
  const char* key;
  std::int64_t GptOptions::*value;
};
constexpr std::array kCounts = {
    Count{"model.width", &GptOptions::width},
    Count{"model.layers", &GptOptions::layers},
    Count{"model.heads", &GptOptions::heads},
    Count{"model.vocabulary", &GptOptions::vocabulary},
    Count{"model.sequence", &GptOptions::sequence},
};

constexpr std::array kTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

bool read_count(const std::string& text, std::int64_t& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

// One of two words.
bool read_choice(const std::string& text, std::string_view no, std::string_view yes, bool& value) {
  value = text == yes;
  return value || text == no;
}

bool read_type(const std::string& text, DType& value) {
  for (const DType type : kTypes) {
    if (text == to_string(type)) {
      value = type;
      return true;
    }
  }
  return false;
}

bool read_number(const std::string& text, double& value) {
  const std::optional<double> number = parse_number(text);
  value = number.value_or(0);
  return number.has_value();
}

// Takes values out of a description, and collects what is wrong with it.
class DescriptionReader {
 public:
  explicit DescriptionReader(std::map<std::string, std::string> values)
      : left_(std::move(values)) {}

  template <typename Read>
  void take(const std::string& key, Read read) {
    const auto found = left_.find(key);
    if (found == left_.end()) {
      add(key + " is missing");
      return;
    }
    if (!read(found->second)) {
      add(detail::concat(key, " is ", in_quotes(found->second, 40)));
    }
    left_.erase(found);
  }

  bool has(const std::string& key) const { return left_.contains(key); }

  // Every problem, in one line.
  std::string problems() {
    for (const auto& [key, value] : left_) {
      if (std::string_view(key).starts_with(kPrefix)) {
        add(in_quotes(key, 40) + " is unknown");
      }
    }
    return problems_;
  }

 private:
  void add(const std::string& problem) {
    problems_.append(problems_.empty() ? "" : ", ").append(problem);
  }

  std::map<std::string, std::string> left_;
  std::string problems_;
};

}  // namespace

std::map<std::string, std::string> describe(const GptOptions& options) {
  std::map<std::string, std::string> description;
  for (const Count& count : kCounts) {
    description[count.key] = std::to_string(options.*count.value);
  }
  description[kTied] = options.tie_head ? "true" : "false";
  description[kGelu] = options.gelu_tanh ? "tanh" : "exact";
  description[kType] = to_string(options.dtype);
  if (options.adapter_rank > 0) {
    description[kAdapterRank] = std::to_string(options.adapter_rank);
    description[kAdapterAlpha] = exact_number(options.adapter_alpha);
  }
  return description;
}

GptOptions gpt_from_description(const std::map<std::string, std::string>& description,
                                const std::string& path) {
  GptOptions options;
  DescriptionReader reader(description);
  for (const Count& count : kCounts) {
    reader.take(count.key,
                [&](const std::string& text) { return read_count(text, options.*count.value); });
  }
  reader.take(kTied, [&](const std::string& text) {
    return read_choice(text, "false", "true", options.tie_head);
  });
  reader.take(kGelu, [&](const std::string& text) {
    return read_choice(text, "exact", "tanh", options.gelu_tanh);
  });
  reader.take(kType, [&](const std::string& text) { return read_type(text, options.dtype); });
  if (reader.has(kAdapterRank) || reader.has(kAdapterAlpha)) {
    reader.take(kAdapterRank, [&](const std::string& text) {
      return read_count(text, options.adapter_rank) && options.adapter_rank > 0;
    });
    reader.take(kAdapterAlpha,
                [&](const std::string& text) { return read_number(text, options.adapter_alpha); });
  }
  const std::string problems = reader.problems();
  TESSERA_CHECK(problems.empty(), ConfigError, printable(path, 400),
                ": describes no GPT of ours: ", problems,
                "; was it written by tessera train, and by this version?");
  try {
    options.check();
  } catch (const ConfigError& error) {  // speaks of flags; nobody gave one
    throw ConfigError(
        detail::concat(printable(path, 400), ": describes an impossible GPT: ", error.what()));
  }
  return options;
}

}  // namespace tessera::models
