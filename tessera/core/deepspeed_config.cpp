#include "tessera/core/deepspeed_config.h"

#include <algorithm>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/deepspeed_rules.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

using Meaning = DeepSpeedMeaning;

// The option that the key's own value is checked against: that of its target where the value is
// the same, else one of the key's type without limits.
Option value_option(const DeepSpeedKey& key) {
  if (key.meaning == Meaning::kSame) {
    return *find_option(key.option);
  }
  const bool elements =
      key.meaning == Meaning::kElements || key.meaning == Meaning::kMasterElements;
  return {key.path,
          key.type,
          "",
          elements ? 0 : -kNoLimit,
          elements ? kMaxInt64AsDouble : kNoLimit,
          "",
          "",
          0,
          "",
          ""};
}

std::string rename(const DeepSpeedKey& key, const std::string& theirs, const std::string& where) {
  std::string_view rest = key.note;
  std::string known;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    const auto equals = entry.find('=');
    if (entry.substr(0, equals) == theirs) {
      return std::string(entry.substr(equals + 1));
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.substr(0, equals));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
  }
  throw ConfigError(detail::concat(where, " = ", in_quotes(theirs), ": expected one of ", known));
}

bool is_fixed_value(const DeepSpeedKey& key, const OptionValue& value) {
  const Option option = value_option(key);
  return value == parse_value(option, key.default_text, key.path);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

using Places = std::vector<std::pair<std::string_view, std::string>>;

Places by_place(Places places) {
  std::stable_sort(places.begin(), places.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  return places;
}

class Translator {
 public:
  Translator(const DeepSpeedInput& input, std::string_view source)
      : view_(input, source), input_(input) {}

  DeepSpeedTranslation run() {
    check_combinations(view_);
    for (const DeepSpeedKey& key : deepspeed_keys()) {
      const auto given = input_.values.find(key.path);
      if (given != input_.values.end()) {
        say(key, given->second);
      } else {
        assume(key);
      }
    }
    // The two numbers of a list have one "auto" together.
    if (input_.autos.count("optimizer.params.betas") != 0) {
      out_.autos.push_back(short_key("optimizer.params.betas"));
    }
    apply_special_keys(view_, out_);
    return std::move(out_);
  }

 private:
  void say(const DeepSpeedKey& key, const OptionValue& raw) {
    const std::string where = view_.where(key.path);
    const std::string shown = view_.shown(key.path);
    switch (key.meaning) {
      case Meaning::kNotNeeded:
        check_value(value_option(key), raw, where);
        out_.not_needed.push_back(short_key(key.path));
        break;
      case Meaning::kFixed: {
        const OptionValue value = check_value(value_option(key), raw, where);
        TESSERA_CHECK(is_fixed_value(key, value), ConfigError, where, " = ", to_text(raw),
                      ": only ", key.default_text, " is supported: ", key.note);
        break;
      }
      case Meaning::kForeign:
        TESSERA_CHECK(!std::get<bool>(raw), ConfigError, where, ": not supported: ", key.note,
                      "; remove it or set enabled to false");
        break;
      case Meaning::kElsewhere:
        if (std::get<bool>(raw)) {
          out_.elsewhere.emplace_back(key.note, short_key(key.path));
        }
        break;
      case Meaning::kSpecial:
        check_value(value_option(key), raw, where);  // the rest in deepspeed_rules.cpp
        break;
      case Meaning::kRenamed: {
        const auto text = std::get<std::string>(check_value(value_option(key), raw, where));
        add(key, rename(key, text, where), shown, false);
        break;
      }
      case Meaning::kElements:
      case Meaning::kMasterElements:
      case Meaning::kSame:
        add(key, check_value(value_option(key), raw, where), shown, false);
        break;
    }
  }

  // A key that is not given: DeepSpeed's default inside a block, else ours. "auto" is always ours.
  void assume(const DeepSpeedKey& key) {
    if (input_.autos.count(key.path) != 0) {
      if (!key.option.empty()) {
        out_.autos.push_back(short_key(key.path));
      }
      return;
    }
    if (key.default_text.empty() || key.meaning == Meaning::kFixed || !defaults_hold(key)) {
      return;
    }
    const std::string from = detail::concat(key.path, " not given: ", key.default_text);
    if (key.meaning == Meaning::kRenamed) {
      const bool is_theirs =
          key.note.find(detail::concat(key.default_text, "=")) != std::string_view::npos;
      const std::string text(key.default_text);
      add(key, is_theirs ? rename(key, text, view_.where(key.path)) : text, from, true);
    } else if (key.default_text == "9223372036854775807") {
      // The one default that a double cannot hold.
      add(key, kUnlimitedBytes, from, true);
    } else {
      add(key, parse_value(value_option(key), key.default_text, key.path), from, true);
    }
  }

  // DeepSpeed's defaults hold inside the blocks that a file gives and that are in force.
  bool defaults_hold(const DeepSpeedKey& key) const {
    const std::string_view block = parent_of(key.path);
    if (block.empty() || !view_.has_block(block)) {
      return false;
    }
    if (block == "fp16" || block == "bf16") {
      return view_.flag(detail::concat(block, ".enabled"));
    }
    if (block.ends_with(".offload_param") || block.ends_with(".offload_optimizer")) {
      const std::string device = view_.text(detail::concat(block, ".device"), "none");
      const bool always = key.path.ends_with(".device");
      return always || device == "nvme";
    }
    return true;
  }

  void add(const DeepSpeedKey& key, const OptionValue& value, const std::string& from,
           bool by_default) {
    DeepSpeedSetting setting;
    setting.option = find_option(key.option);
    TESSERA_INVARIANT(setting.option != nullptr, key.path, " names no option");
    setting.key = key.path;
    setting.by_default = by_default;
    setting.from = from;
    setting.least_bytes = key.least_bytes;
    if (key.meaning == Meaning::kElements) {
      setting.numel = std::get<std::int64_t>(value);
    } else if (key.meaning == Meaning::kMasterElements) {
      setting.value =
          std::max(key.least_bytes, bytes_of_elements(std::get<std::int64_t>(value), 4));
    } else {
      setting.value = value;
    }
    out_.settings.push_back(std::move(setting));
  }

  const DeepSpeedView view_;
  const DeepSpeedInput& input_;
  DeepSpeedTranslation out_;
};

}  // namespace

std::string short_key(std::string_view path) {
  constexpr std::string_view kZero = "zero_optimization.";
  std::string text(path.starts_with(kZero) ? path.substr(kZero.size()) : path);
  if (const auto params = text.find(".params."); params != std::string::npos) {
    text.erase(params, std::string_view(".params").size());
  }
  return text;
}

std::vector<std::string> DeepSpeedTranslation::notices() const {
  std::vector<std::string> lines;
  if (!autos.empty()) {
    lines.push_back(
        detail::concat("\"auto\" is Tessera's default, or what a flag says: ", joined(autos)));
  }
  if (!not_needed.empty() || !old_names.empty()) {
    const std::string unneeded =
        not_needed.empty() ? "" : detail::concat("not needed here: ", joined(not_needed));
    const std::string old =
        old_names.empty() ? "" : detail::concat("old names: ", joined(old_names));
    lines.push_back(detail::concat(unneeded, unneeded.empty() || old.empty() ? "" : "; ", old));
  }
  std::string places;
  std::string_view last;
  for (const auto& [what, key] : by_place(elsewhere)) {
    if (what != last) {
      places += detail::concat(places.empty() ? "" : "; ", what, " for ", key);
    } else {
      places += detail::concat(", ", key);
    }
    last = what;
  }
  if (!places.empty()) {
    lines.push_back(detail::concat("not started from here, use ", places));
  }
  return lines;
}

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source) {
  return Translator(input, source).run();
}

std::int64_t element_bytes(std::string_view precision) { return precision == "fp32" ? 4 : 2; }

std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each) {
  return numel > kUnlimitedBytes / bytes_each ? kUnlimitedBytes : numel * bytes_each;
}

}  // namespace tessera
