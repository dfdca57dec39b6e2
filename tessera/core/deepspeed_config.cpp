#include "tessera/core/deepspeed_config.h"

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
        notice(key, "accepted, not needed", key.note);
        break;
      case Meaning::kFixed: {
        const OptionValue value = check_value(value_option(key), raw, where);
        TESSERA_CHECK(is_fixed_value(key, value), ConfigError, where, " = ", to_text(raw),
                      ": only ", key.default_text, " is supported: ", key.note);
        notice(key, "accepted, not needed", "it is the only supported value");
        break;
      }
      case Meaning::kForeign:
        TESSERA_CHECK(!std::get<bool>(raw), ConfigError, where, ": not supported: ", key.note,
                      "; remove it or set enabled to false");
        notice(key, "accepted, not used", key.note);
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

  // A key that is not given, or given as "auto": DeepSpeed's default inside a block, else ours.
  void assume(const DeepSpeedKey& key) {
    const bool is_auto = input_.autos.count(key.path) != 0;
    const bool defaults =
        !key.default_text.empty() && key.meaning != Meaning::kFixed && defaults_hold(key);
    if (!defaults) {
      if (is_auto) {
        out_.notices.push_back(detail::concat(key.path, " = \"auto\": taken as not given"));
      }
      return;
    }
    const std::string from = detail::concat(key.path, is_auto ? " = \"auto\"" : " not given",
                                            ", DeepSpeed's default ", key.default_text);
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
    if (key.meaning == Meaning::kElements) {
      setting.numel = std::get<std::int64_t>(value);
      setting.from += " elements";
    } else if (key.meaning == Meaning::kMasterElements) {
      setting.value = bytes_of_elements(std::get<std::int64_t>(value), 4);
      setting.from += " elements (fp32 master weights, 4 B each)";
    } else {
      setting.value = value;
    }
    out_.settings.push_back(std::move(setting));
  }

  void notice(const DeepSpeedKey& key, std::string_view verdict, std::string_view why) {
    out_.notices.push_back(detail::concat(key.path, ": ", verdict, ": ", why));
  }

  const DeepSpeedView view_;
  const DeepSpeedInput& input_;
  DeepSpeedTranslation out_;
};

}  // namespace

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source) {
  return Translator(input, source).run();
}

std::int64_t element_bytes(std::string_view precision) { return precision == "fp32" ? 4 : 2; }

std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each) {
  return numel > kUnlimitedBytes / bytes_each ? kUnlimitedBytes : numel * bytes_each;
}

}  // namespace tessera
