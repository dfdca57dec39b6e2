#include "tessera/core/config_input.h"

#include <algorithm>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/suggest.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 32;

// "line 3, column 7" of a byte offset that counts from one, as the parser's does.
std::string position(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte == 0 ? 0 : std::min(byte - 1, text.size()));
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const auto line_start = before.rfind('\n');
  const auto column = before.size() - (line_start == std::string_view::npos ? 0 : line_start + 1);
  return detail::concat("line ", line, ", column ", column + 1);
}

// The parser's message without its own prefixes: "[json.exception.x.1] parse error at line 1,
// column 2: syntax error ... - reason"; some messages lack the second or the third.
std::string reason(std::string_view what) {
  for (const std::string_view separator : {"] ", " - "}) {
    const auto at = what.find(separator);
    if (at != std::string_view::npos) {
      what.remove_prefix(at + separator.size());
    }
  }
  if (const auto at = what.find(": "); what.starts_with("parse error at ") && at != what.npos) {
    what.remove_prefix(at + 2);
  }
  return printable(what, 160);
}

json parse(std::string_view text, std::string_view source) {
  // The parser itself would let the last of two equal keys win in silence.
  std::vector<std::set<std::string>> seen;
  const auto watch = [&seen, source](int depth, json::parse_event_t event, json& parsed) {
    TESSERA_CHECK(depth <= kMaxDepth, ConfigError, source, ": nested deeper than ", kMaxDepth,
                  " levels; no option is that deep");
    if (event == json::parse_event_t::object_start) {
      seen.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      seen.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      TESSERA_CHECK(seen.back().insert(key).second, ConfigError, source, ": key ", in_quotes(key),
                    " is given twice in one object; remove one of them");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    throw ConfigError(detail::concat(source, ": not valid JSON at ", position(text, error.byte),
                                     ": ", reason(error.what())));
  } catch (const json::exception& error) {  // a number that no double holds
    throw ConfigError(detail::concat(source, ": not valid JSON: ", reason(error.what())));
  }
}

OptionValue scalar(const json& value, const std::string& where) {
  switch (value.type()) {
    case json::value_t::boolean:
      return value.get<bool>();
    case json::value_t::number_integer:
      return value.get<std::int64_t>();
    case json::value_t::number_unsigned: {
      const auto wide = value.get<std::uint64_t>();
      return wide <= static_cast<std::uint64_t>(kUnlimitedBytes)
                 ? OptionValue(static_cast<std::int64_t>(wide))
                 : OptionValue(static_cast<double>(wide));
    }
    case json::value_t::number_float:
      return value.get<double>();
    case json::value_t::string:
      return value.get<std::string>();
    case json::value_t::array: {
      std::vector<std::string> list;
      for (const json& item : value) {
        TESSERA_CHECK(item.is_string(), ConfigError, where,
                      ": every item of a list must be a string, one is of type ", item.type_name());
        list.push_back(item.get<std::string>());
      }
      return list;
    }
    default:
      throw ConfigError(detail::concat(where, ": expected a value, got ", value.type_name()));
  }
}

class Reader {
 public:
  explicit Reader(std::string_view source) : source_(source) {}

  ConfigInput read(const json& root) {
    TESSERA_CHECK(root.is_object(), ConfigError, source_,
                  ": the outermost value must be an object in braces, it is of type ",
                  root.type_name());
    for (const auto& [key, value] : root.items()) {
      if (is_own_section(section_of(key))) {
        read_own(key, value);
      } else {
        read_deepspeed(key == "bfloat16" && !root.contains("bf16") ? "bf16" : key, value);
      }
    }
    return std::move(input_);
  }

 private:
  static bool is_own_section(std::string_view section) {
    return std::any_of(option_table().begin(), option_table().end(),
                       [section](const Option& o) { return section_of(o.name) == section; });
  }

  std::string where(std::string_view path) const {
    return detail::concat(source_, ": ", printable(path));
  }

  void read_own(const std::string& path, const json& value) {
    if (find_option(path) != nullptr) {
      const OptionValue raw = scalar(value, where(path));
      const auto [at, inserted] = input_.own.emplace(path, raw);
      TESSERA_CHECK(inserted || at->second == raw, ConfigError, where(path),
                    ": given twice with different values, ", to_text(at->second), " and ",
                    to_text(raw));
      return;
    }
    const bool is_section = section_of(path) == path;
    TESSERA_CHECK(!is_section || value.is_object(), ConfigError, where(path),
                  ": expected an object with the options of this section, it is of type ",
                  value.type_name());
    if (!is_section) {
      unknown(path);
    }
    for (const auto& [key, nested] : value.items()) {
      read_own(path + "." + key, nested);
    }
  }

  void read_deepspeed(const std::string& path, const json& value) {
    const DeepSpeedKey* key = find_deepspeed_key(path);
    const bool is_block = is_deepspeed_block(path);
    const bool is_pair = find_deepspeed_key(path + "[0]") != nullptr;
    if (key == nullptr && !is_block && !is_pair) {
      unknown(path);
    }
    if (value.is_null()) {
      return;  // Python's None: not given
    }
    if (value == "auto") {
      input_.deepspeed.autos.insert(key != nullptr ? std::string(key->path) : path);
    } else if (is_block && value.is_object()) {
      input_.deepspeed.blocks.insert(path);
      for (const auto& [name, nested] : value.items()) {
        read_deepspeed(path + "." + name, nested);
      }
    } else if (is_pair) {
      TESSERA_CHECK(
          value.is_array() && value.size() == 2 && value[0].is_number() && value[1].is_number(),
          ConfigError, where(path), ": expected a list of two numbers");
      input_.deepspeed.values[path + "[0]"] = scalar(value[0], where(path));
      input_.deepspeed.values[path + "[1]"] = scalar(value[1], where(path));
    } else if (key == nullptr) {
      throw ConfigError(
          detail::concat(where(path), ": expected an object, it is of type ", value.type_name()));
    } else {
      add(*key, path,
          key->meaning == DeepSpeedMeaning::kForeign     ? is_enabled(value, path, false)
          : key->meaning == DeepSpeedMeaning::kElsewhere ? is_enabled(value, path, true)
                                                         : scalar(value, where(path)));
    }
  }

  void add(const DeepSpeedKey& key, const std::string& path, const OptionValue& value) {
    const bool inserted = input_.deepspeed.values.emplace(key.path, value).second;
    TESSERA_CHECK(inserted, ConfigError, where(path), ": given twice, also under its other name; ",
                  "keep one of ", key.path, " and ", key.alias);
  }

  // Blocks of another subject are switched on by "enabled". Where there is none, they are settings
  // of something that nobody switched on, unless any switch inside counts.
  OptionValue is_enabled(const json& value, const std::string& path, bool by_any) const {
    if (!value.is_object()) {
      TESSERA_CHECK(value.is_boolean(), ConfigError, where(path),
                    ": expected an object, it is of type ", value.type_name());
      return value.get<bool>();
    }
    const auto is_on = [](const json& item) { return item.is_boolean() && item.get<bool>(); };
    const auto enabled = value.find("enabled");
    return enabled != value.end() ? is_on(*enabled)
                                  : by_any && std::any_of(value.begin(), value.end(), is_on);
  }

  [[noreturn]] void unknown(const std::string& path) const {
    TESSERA_CHECK(why_removed(path).empty(), ConfigError, where(path),
                  ": there is no such option any more: ", why_removed(path));
    std::vector<std::string_view> known;
    for (const Option& option : option_table()) {
      known.push_back(option.name);
    }
    std::vector<std::string> names;
    for (const DeepSpeedKey& key : deepspeed_keys()) {
      names.emplace_back(key.path.substr(0, key.path.find('[')));
      if (!key.alias.empty()) {
        const std::string_view parent = parent_of(key.path);
        names.push_back(detail::concat(parent, parent.empty() ? "" : ".", key.alias));
      }
      for (std::string_view block = parent_of(key.path); !block.empty(); block = parent_of(block)) {
        names.emplace_back(block);
      }
    }
    for (const Option& option : option_table()) {
      names.emplace_back(section_of(option.name));
    }
    known.insert(known.end(), names.begin(), names.end());
    const std::string_view near = nearest_key(path, known);
    throw ConfigError(
        near.empty() ? detail::concat(where(path), ": unknown key; `tessera options` lists all")
                     : detail::concat(where(path), ": unknown key; did you mean ", near, "?"));
  }

  // Names in the same block come first; the last part alone is compared there, so that a long
  // path does not excuse a wholly different name.
  static std::string_view nearest_key(std::string_view path,
                                      const std::vector<std::string_view>& known) {
    const std::string_view parent = parent_of(path);
    const std::size_t skip = parent.empty() ? 0 : parent.size() + 1;
    std::vector<std::string_view> siblings;
    for (const std::string_view name : known) {
      if (parent_of(name) == parent) {
        siblings.push_back(name.substr(skip));
      }
    }
    const std::string_view sibling = nearest(path.substr(skip), siblings);
    if (!sibling.empty()) {
      return {sibling.data() - skip, sibling.size() + skip};
    }
    // The right name in the wrong place: stage3_max_live_parameters at the top level.
    const std::string_view last = path.substr(skip);
    for (const std::string_view name : known) {
      const std::string_view name_parent = parent_of(name);
      if (!name_parent.empty() && name.substr(name_parent.size() + 1) == last) {
        return name;
      }
    }
    return nearest(path, known);
  }

  const std::string source_;
  ConfigInput input_;
};

}  // namespace

ConfigInput read_config(std::string_view text, std::string_view source) {
  const std::string name = printable(source);
  return Reader(name).read(parse(text, name));
}

}  // namespace tessera
