#include "tessera/core/config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/deepspeed_config.h"
#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/suggest.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

using nlohmann::json;

// Defaults are parsed once; the table never changes.
const OptionValue& parsed_default(const Option& option) {
  static const std::map<std::string_view, OptionValue> defaults = [] {
    std::map<std::string_view, OptionValue> all;
    for (const Option& each : option_table()) {
      all.emplace(each.name, default_value(each));
    }
    return all;
  }();
  return defaults.at(option.name);
}

void check_not_removed(std::string_view name, const std::string& where) {
  TESSERA_CHECK(why_removed(name).empty(), ConfigError, where,
                ": there is no such option any more: ", why_removed(name));
}

std::string did_you_mean(std::string_view near) {
  return near.empty() ? "; `tessera options` lists all"
                      : detail::concat("; did you mean ", near, "?");
}

const Option& known_option(std::string_view name) {
  if (const Option* option = find_option(name)) {
    return *option;
  }
  check_not_removed(name, in_quotes(name));
  std::vector<std::string_view> known;
  for (const Option& each : option_table()) {
    known.push_back(each.name);
  }
  throw ConfigError(
      detail::concat(in_quotes(name), ": unknown option", did_you_mean(nearest(name, known))));
}

// --- from JSON to named values ---

struct ConfigInput {
  std::map<std::string, OptionValue> own;  // by option name, types not checked yet
  DeepSpeedInput deepspeed;
};

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

constexpr int kMaxDepth = 32;

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

// Takes a file apart: decides which keys are Tessera's and which are DeepSpeed's, and rejects keys
// that are neither, with the nearest known one.
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
    if (path == kDeepSpeedQuantisedNames && value.is_object()) {
      read_quantised_names(value);
    } else if (value == "auto") {
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
      TESSERA_CHECK(key->meaning != DeepSpeedMeaning::kFixed || !value.is_object(), ConfigError,
                    where(path), ": not supported: ", key->note, "; remove it");
      const OptionValue raw =
          key->meaning == DeepSpeedMeaning::kForeign     ? is_enabled(value, path, false)
          : key->meaning == DeepSpeedMeaning::kElsewhere ? is_enabled(value, path, true)
                                                         : scalar(value, where(path));
      TESSERA_CHECK(input_.deepspeed.values.emplace(key->path, raw).second, ConfigError,
                    where(path), ": given twice, also under its other name; keep one of ",
                    key->path, " and ", key->alias);
    }
  }

  // Its keys are parts of modules' names.
  void read_quantised_names(const json& value) {
    for (const auto& [name, entry] : value.items()) {
      const std::string where = this->where(detail::concat(kDeepSpeedQuantisedNames, ".", name));
      TESSERA_CHECK(entry.is_object(), ConfigError, where, ": expected an object, it is of type ",
                    entry.type_name());
      DeepSpeedQuantisedNames names{name, {}};
      for (const auto& [key, each] : entry.items()) {
        names.values.emplace(key, scalar(each, detail::concat(where, ".", printable(key))));
      }
      input_.deepspeed.quantised_names.push_back(std::move(names));
    }
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
    check_not_removed(path, where(path));
    std::vector<std::string> names;
    for (const Option& option : option_table()) {
      names.emplace_back(option.name);
    }
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
    const std::vector<std::string_view> known(names.begin(), names.end());
    throw ConfigError(
        detail::concat(where(path), ": unknown key", did_you_mean(nearest_key(path, known))));
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
    // The right name in the wrong block: stage3_max_live_parameters at the top level.
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

// --- subjects of the notices ---

constexpr std::array<std::string_view, 4> kSubjects = {"training", "sharding", "offload",
                                                       "optimizer"};

std::string_view subject_of(std::string_view option) {
  const std::string_view section = section_of(option);
  if (section == "precision" || section == "batch" || section == "loss_scale" ||
      option == "grad.clip_norm" || option == "grad.skip_nonfinite") {
    return kSubjects[0];
  }
  if (section == "place" || section == "nvme" || option == "optim.cpu_share") {
    return kSubjects[2];
  }
  const bool is_size = option == "optim.sub_group_bytes";
  return !is_size && (section == "optim" || section == "schedule") ? kSubjects[3] : kSubjects[1];
}

// "batch.total = 8 (--batch, not train_batch_size = 16)".
std::string notice_of(const ConfigSetting& setting) {
  const std::string text =
      detail::concat(setting.option->name, " = ", to_text(*setting.option, setting.value));
  if (setting.kind == SettingOrigin::kLater) {
    return detail::concat(text, " (", setting.origin, ", not ", short_key(setting.replaced), ")");
  }
  const bool is_raised = setting.kind == SettingOrigin::kDeepSpeed && setting.least_bytes > 0 &&
                         setting.value == OptionValue(setting.least_bytes);
  return is_raised ? detail::concat(text, " (the least, for ", short_key(setting.from), ")") : text;
}

}  // namespace

Config Config::from_json(std::string_view text, std::string_view source_name) {
  const std::string source = printable(source_name);
  const ConfigInput input = Reader(source).read(parse(text, source));
  Config config;
  for (const auto& [name, raw] : input.own) {
    const Option& option = known_option(name);
    const std::string origin = detail::concat(source, ": ", name);
    config.assign({&option, check_value(option, raw, origin), origin, SettingOrigin::kOwnKey});
  }
  if (!input.deepspeed.empty()) {
    DeepSpeedTranslation translation = translate_deepspeed(input.deepspeed, source);
    config.deepspeed_source_ = source;
    config.deepspeed_notices_ = std::move(translation.notices);
    // What was said goes before what DeepSpeed assumes, and precision and learning rate before
    // everything that follows them.
    std::stable_sort(translation.settings.begin(), translation.settings.end(),
                     [](const ConfigSetting& a, const ConfigSetting& b) {
                       const auto rank = [](const ConfigSetting& each) {
                         return std::pair(each.kind == SettingOrigin::kDeepSpeedDefault,
                                          each.numel.has_value() || each.lr_ratio.has_value());
                       };
                       return rank(a) < rank(b);
                     });
    for (ConfigSetting& setting : translation.settings) {
      config.adopt(std::move(setting));
    }
  }
  return config;
}

Config Config::from_file(const std::string& path) {
  constexpr std::size_t kMaxBytes = 16 << 20;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  TESSERA_CHECK(file != nullptr, ConfigError, "config file ", in_quotes(path),
                ": cannot be opened: ", std::strerror(errno));
  std::string text;
  std::array<char, 16384> chunk{};
  while (const std::size_t count = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    text.append(chunk.data(), count);
    TESSERA_CHECK(text.size() <= kMaxBytes, ConfigError, "config file ", in_quotes(path),
                  ": larger than ", exact_bytes(kMaxBytes), "; is it the right file?");
  }
  TESSERA_CHECK(std::ferror(file.get()) == 0, ConfigError, "config file ", in_quotes(path),
                ": cannot be read: ", std::strerror(errno));
  return from_json(text, path);
}

void Config::adopt(ConfigSetting setting) {
  const Option& option = *setting.option;
  setting.value = following_value(setting);
  const ConfigSetting* const present = find(option.name);
  if (present != nullptr) {
    TESSERA_CHECK(
        setting.kind == SettingOrigin::kDeepSpeedDefault || present->value == setting.value,
        ConfigError, present->origin, " = ", to_text(option, present->value), ", but ",
        setting.from, " says ", option.name, " = ", to_text(option, setting.value),
        "; remove one of them");
    return;
  }
  settings_.emplace(option.name, std::move(setting));
}

OptionValue Config::following_value(const ConfigSetting& setting) const {
  const std::string where = detail::concat(setting.origin, " -> ", setting.option->name);
  if (setting.numel) {
    const std::int64_t bytes =
        bytes_of_elements(*setting.numel, element_bytes(get_string("precision")));
    return check_value(*setting.option, std::max(setting.least_bytes, bytes), where);
  }
  if (setting.lr_ratio) {
    return check_value(*setting.option, *setting.lr_ratio * get_double("optim.lr"), where);
  }
  return setting.value;
}

void Config::assign(ConfigSetting setting) {
  const Option& option = *setting.option;
  ConfigSetting& kept = settings_[option.name];
  const bool replaces = kept.kind == SettingOrigin::kDeepSpeed && kept.value != setting.value;
  setting.replaced = replaces ? kept.from : kept.replaced;
  kept = std::move(setting);
  if (option.name == "precision" || option.name == "optim.lr") {
    for (auto& [name, each] : settings_) {
      each.value = following_value(each);
    }
  }
}

void Config::set(std::string_view name, const OptionValue& value, std::string_view origin) {
  const Option& option = known_option(name);
  assign({&option, check_value(option, value, name), std::string(origin)});
}

void Config::apply_flag(std::string_view assignment) {
  const auto equals = assignment.find('=');
  TESSERA_CHECK(equals != std::string_view::npos, ConfigError, in_quotes(assignment),
                ": expected name=value, for example comm.timeout_s=30");
  const std::string_view name = assignment.substr(0, equals);
  const Option& option = known_option(name);
  assign({&option, parse_value(option, assignment.substr(equals + 1), name), "command line"});
}

void Config::check() const {
  const std::int64_t nvme_bytes = get_bytes("memory.nvme");
  const bool has_paths = !get_list("nvme.paths").empty();
  for (const char* name : {"place.parameters", "place.optimizer"}) {
    TESSERA_CHECK(get_string(name) != "nvme" || has_paths, ConfigError, name,
                  " = nvme: nvme.paths is empty; give a directory on the disk");
    TESSERA_CHECK(get_string(name) != "nvme" || nvme_bytes != 0, ConfigError, name,
                  " = nvme, but memory.nvme = 0 allows nothing there; raise it");
  }
  TESSERA_CHECK(nvme_bytes == 0 || nvme_bytes == kUnlimitedBytes || has_paths, ConfigError,
                "memory.nvme = ", to_text(known_option("memory.nvme"), nvme_bytes),
                ": nvme.paths is empty; give a directory on the disk");

  const std::int64_t total = get_int("batch.total");
  const std::int64_t micro = get_int("batch.micro_per_rank");
  const std::int64_t accumulate = get_int("batch.accumulate");
  TESSERA_CHECK(total % accumulate == 0, ConfigError, shown("batch.total"),
                " is not a multiple of ", shown("batch.accumulate"));
  TESSERA_CHECK(micro == 0 || (total / accumulate) % micro == 0, ConfigError, shown("batch.total"),
                " is not a multiple of ", shown("batch.micro_per_rank"), " times ",
                shown("batch.accumulate"));

  TESSERA_CHECK(get_int("quant.block_numel") % 32 == 0, ConfigError, shown("quant.block_numel"),
                " is not a multiple of 32; take one, the default is 128");
  TESSERA_CHECK(get_int("quant.gradient_bits") == 4 || get_int("quant.gradient_bits") == 8,
                ConfigError, shown("quant.gradient_bits"),
                ": gradients are quantised to 4 or 8 bits; take one of them");
  TESSERA_CHECK(!get_bool("quant.error_feedback") || get_bool("quant.gradients"), ConfigError,
                "quant.error_feedback = true needs quant.gradients = true");
  const std::int64_t bits = get_int("quant.frozen_bits");
  TESSERA_CHECK(bits == 0 || bits == 4 || bits == 8, ConfigError, shown("quant.frozen_bits"),
                ": integers have 4 or 8 bits; 0 keeps frozen parameters as they are");
  TESSERA_CHECK(bits != 0 || get_list("quant.frozen_names").empty(), ConfigError,
                "quant.frozen_names is given, and quant.frozen_bits = 0; set that to 4 or 8");
  TESSERA_CHECK(get_double("loss_scale.min") <= get_double("loss_scale.initial"), ConfigError,
                "loss_scale.min = ", get_double("loss_scale.min"),
                " is above loss_scale.initial = ", get_double("loss_scale.initial"));
}

const ConfigSetting* Config::find(std::string_view name) const {
  const auto found = settings_.find(known_option(name).name);
  return found != settings_.end() ? &found->second : nullptr;
}

const OptionValue& Config::value(std::string_view name, OptionType type) const {
  const Option& option = known_option(name);
  const bool is_text = type == OptionType::kString && option.type == OptionType::kChoice;
  TESSERA_INVARIANT(option.type == type || is_text, "option ", name, " is read as another type");
  const auto found = settings_.find(option.name);
  return found != settings_.end() ? found->second.value : parsed_default(option);
}

bool Config::get_bool(std::string_view name) const {
  return std::get<bool>(value(name, OptionType::kBool));
}
std::int64_t Config::get_int(std::string_view name) const {
  return std::get<std::int64_t>(value(name, OptionType::kInt));
}
double Config::get_double(std::string_view name) const {
  return std::get<double>(value(name, OptionType::kDouble));
}
std::int64_t Config::get_bytes(std::string_view name) const {
  return std::get<std::int64_t>(value(name, OptionType::kBytes));
}
double Config::get_seconds(std::string_view name) const {
  return std::get<double>(value(name, OptionType::kSeconds));
}
const std::string& Config::get_string(std::string_view name) const {
  return std::get<std::string>(value(name, OptionType::kString));
}
const std::vector<std::string>& Config::get_list(std::string_view name) const {
  return std::get<std::vector<std::string>>(value(name, OptionType::kList));
}

bool Config::is_set(std::string_view name) const { return find(name) != nullptr; }

bool Config::is_given(std::string_view name) const {
  const ConfigSetting* const setting = find(name);
  return setting != nullptr && setting->kind != SettingOrigin::kDeepSpeedDefault;
}

bool Config::is_from_file(std::string_view name) const {
  return is_given(name) && find(name)->kind != SettingOrigin::kLater;
}

std::string Config::shown(std::string_view name) const {
  const Option& option = known_option(name);
  const ConfigSetting* const setting = find(name);
  std::string origin = "a default";
  if (setting != nullptr && setting->kind == SettingOrigin::kDeepSpeedDefault) {
    origin = "a default, DeepSpeed's";
  } else if (setting != nullptr) {
    origin = setting->origin;
    if (setting->kind == SettingOrigin::kOwnKey) {
      origin.resize(origin.size() - std::string_view(": ").size() - name.size());  // the file alone
    }
  }
  const OptionValue& value = setting != nullptr ? setting->value : parsed_default(option);
  return detail::concat(name, " = ", to_text(option, value), " (", origin, ")");
}

std::vector<std::string> Config::notices() const {
  if (deepspeed_source_.empty()) {
    return {};
  }
  std::vector<std::string> lines{
      detail::concat(deepspeed_source_, " has DeepSpeed's keys: ZeRO stage 3; `tessera config ",
                     deepspeed_source_, "` lists what each has become")};
  for (const std::string_view subject : kSubjects) {
    std::string given;
    std::string defaults;
    for (const Option& option : option_table()) {
      const ConfigSetting* const setting = find(option.name);
      if (setting == nullptr || subject_of(option.name) != subject) {
        continue;
      }
      const bool differs = setting->value != parsed_default(option);
      const bool is_default = setting->kind == SettingOrigin::kDeepSpeedDefault;
      if (!setting->replaced.empty() ||
          (differs && (is_default || setting->kind == SettingOrigin::kDeepSpeed))) {
        std::string& list = is_default && setting->replaced.empty() ? defaults : given;
        list += (list.empty() ? "" : ", ") + notice_of(*setting);
      }
    }
    if (!defaults.empty()) {
      given += (given.empty() ? "DeepSpeed's defaults: " : "; DeepSpeed's defaults: ") + defaults;
    }
    if (!given.empty()) {
      lines.push_back(detail::concat(subject, ": ", given));
    }
  }
  lines.insert(lines.end(), deepspeed_notices_.begin(), deepspeed_notices_.end());
  return lines;
}

std::string Config::describe() const {
  std::string lines;
  for (const Option& option : option_table()) {
    const ConfigSetting* const setting = find(option.name);
    if (setting != nullptr && setting->value != parsed_default(option)) {
      const bool is_default = setting->kind == SettingOrigin::kDeepSpeedDefault;
      lines += detail::concat(
          option.name, " = ", to_text(option, setting->value), "  (", setting->origin,
          is_default ? " not given" : "",
          setting->numel ? detail::concat(", ", *setting->numel, " elements") : "", ")\n");
    }
  }
  return lines;
}

std::map<std::string, std::string> Config::changed() const {
  std::map<std::string, std::string> values;
  for (const Option& option : option_table()) {
    const ConfigSetting* const setting = find(option.name);
    if (setting != nullptr && setting->value != parsed_default(option)) {
      values.emplace(option.name, to_text(option, setting->value));
    }
  }
  return values;
}

std::vector<std::string> Config::unread() const {
  std::vector<std::string> names;
  for (const Option& option : option_table()) {
    if (option.read_by.empty() && is_given(option.name) &&
        find(option.name)->value != parsed_default(option)) {
      names.push_back(detail::concat(option.name, " (", find(option.name)->origin, ")"));
    }
  }
  return names;
}

}  // namespace tessera
