#include "tessera/core/config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "tessera/core/deepspeed_config.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/suggest.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

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

const Option& known_option(std::string_view name) {
  if (const Option* option = find_option(name)) {
    return *option;
  }
  TESSERA_CHECK(why_removed(name).empty(), ConfigError, in_quotes(name),
                ": there is no such option any more: ", why_removed(name));
  std::vector<std::string_view> known;
  for (const Option& each : option_table()) {
    known.push_back(each.name);
  }
  const std::string_view near = nearest(name, known);
  throw ConfigError(
      near.empty()
          ? detail::concat(in_quotes(name), ": unknown option; `tessera options` lists all")
          : detail::concat(in_quotes(name), ": unknown option; did you mean ", near, "?"));
}

}  // namespace

Config Config::from_json(std::string_view text, std::string_view source_name) {
  const std::string source = printable(source_name);
  const ConfigInput input = read_config(text, source);
  Config config;
  for (const auto& [name, raw] : input.own) {
    const Option& option = known_option(name);
    Setting setting;
    setting.origin = detail::concat(source, ": ", name);
    setting.value = check_value(option, raw, setting.origin);
    setting.kind = Origin::kOwnKey;
    config.assign(option, std::move(setting));
  }
  const DeepSpeedInput& theirs = input.deepspeed;
  if (!theirs.values.empty() || !theirs.autos.empty() || !theirs.blocks.empty()) {
    const DeepSpeedTranslation translation = translate_deepspeed(theirs, source);
    config.deepspeed_source_ = source;
    config.notices_ = translation.notices();
    config.adopt(translation.settings, source);
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

// What was said goes before what DeepSpeed assumes, and precision and learning rate before
// everything that follows them.
void Config::adopt(const std::vector<DeepSpeedSetting>& settings, const std::string& source) {
  for (const bool by_default : {false, true}) {
    for (const bool follows : {false, true}) {
      for (const DeepSpeedSetting& setting : settings) {
        const bool is_following = setting.numel.has_value() || setting.lr_ratio.has_value();
        if (setting.by_default == by_default && is_following == follows) {
          adopt_one(setting, source);
        }
      }
    }
  }
}

void Config::adopt_one(const DeepSpeedSetting& given, const std::string& source) {
  const Option& option = *given.option;
  Setting setting;
  setting.value = given.value;
  setting.origin = detail::concat(source, ": ", given.key);
  setting.kind = given.by_default ? Origin::kDeepSpeedDefault : Origin::kDeepSpeed;
  setting.from = given.from;
  setting.numel = given.numel;
  setting.least_bytes = given.least_bytes;
  setting.lr_ratio = given.lr_ratio;
  setting.value = following_value(option, setting,
                                  detail::concat(source, ": ", given.from, " -> ", option.name));
  const auto present = settings_.find(option.name);
  if (present != settings_.end()) {
    TESSERA_CHECK(given.by_default || present->second.value == setting.value, ConfigError,
                  present->second.origin, " = ", to_text(option, present->second.value), ", but ",
                  given.from, " says ", option.name, " = ", to_text(option, setting.value),
                  "; remove one of them");
    return;
  }
  settings_[std::string(option.name)] = std::move(setting);
}

OptionValue Config::following_value(const Option& option, const Setting& setting,
                                    std::string_view where) const {
  if (setting.numel) {
    const std::int64_t bytes =
        bytes_of_elements(*setting.numel, element_bytes(get_string("precision")));
    return check_value(option, std::max(setting.least_bytes, bytes), where);
  }
  if (setting.lr_ratio) {
    return check_value(option, *setting.lr_ratio * get_double("optim.lr"), where);
  }
  return setting.value;
}

void Config::follow() {
  for (auto& [name, setting] : settings_) {
    const Option& option = known_option(name);
    setting.value =
        following_value(option, setting, detail::concat(setting.origin, " -> ", option.name));
  }
}

void Config::assign(const Option& option, Setting setting) {
  Setting& kept = settings_[std::string(option.name)];
  if (kept.kind == Origin::kDeepSpeed && kept.value != setting.value) {
    setting.replaced = kept.from;
  } else if (!kept.replaced.empty()) {
    setting.replaced = kept.replaced;
  }
  kept = std::move(setting);
  if (option.name == "precision" || option.name == "optim.lr") {
    follow();
  }
}

void Config::set(std::string_view name, const OptionValue& value, std::string_view origin) {
  const Option& option = known_option(name);
  Setting setting;
  setting.value = check_value(option, value, name);
  setting.origin = origin;
  assign(option, std::move(setting));
}

void Config::apply_flag(std::string_view assignment) {
  const auto equals = assignment.find('=');
  TESSERA_CHECK(equals != std::string_view::npos, ConfigError, in_quotes(assignment),
                ": expected name=value, for example comm.timeout_s=30");
  const std::string_view name = assignment.substr(0, equals);
  const Option& option = known_option(name);
  Setting setting;
  setting.value = parse_value(option, assignment.substr(equals + 1), name);
  setting.origin = "command line";
  assign(option, std::move(setting));
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

  TESSERA_CHECK(get_int("shard.group_size") == 0 || get_int("shard.secondary_group_size") <= 1,
                ConfigError, "shard.group_size = ", get_int("shard.group_size"),
                " and shard.secondary_group_size = ", get_int("shard.secondary_group_size"),
                " exclude each other; set one of them");
  TESSERA_CHECK(!get_bool("quant.error_feedback") || get_bool("quant.gradients"), ConfigError,
                "quant.error_feedback = true needs quant.gradients = true");
  TESSERA_CHECK(get_double("loss_scale.min") <= get_double("loss_scale.initial"), ConfigError,
                "loss_scale.min = ", get_double("loss_scale.min"),
                " is above loss_scale.initial = ", get_double("loss_scale.initial"));
}

const OptionValue& Config::value(std::string_view name, OptionType type) const {
  const Option& option = known_option(name);
  const bool is_text = type == OptionType::kString && option.type == OptionType::kChoice;
  TESSERA_INVARIANT(option.type == type || is_text, "option ", name, " is read as another type");
  const auto found = settings_.find(name);
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

bool Config::is_set(std::string_view name) const {
  return settings_.count(known_option(name).name) != 0;
}

bool Config::is_given(std::string_view name) const {
  const auto found = settings_.find(known_option(name).name);
  return found != settings_.end() && found->second.kind != Origin::kDeepSpeedDefault;
}

bool Config::is_from_file(std::string_view name) const {
  const auto found = settings_.find(known_option(name).name);
  return found != settings_.end() &&
         (found->second.kind == Origin::kOwnKey || found->second.kind == Origin::kDeepSpeed);
}

std::string Config::describe() const {
  std::string lines;
  for (const Option& option : option_table()) {
    const auto found = settings_.find(option.name);
    if (found != settings_.end() && found->second.value != parsed_default(option)) {
      const bool is_default = found->second.kind == Origin::kDeepSpeedDefault;
      lines += detail::concat(
          option.name, " = ", to_text(option, found->second.value), "  (", found->second.origin,
          is_default ? " not given" : "",
          found->second.numel ? detail::concat(", ", *found->second.numel, " elements") : "",
          ")\n");
    }
  }
  return lines;
}

}  // namespace tessera
