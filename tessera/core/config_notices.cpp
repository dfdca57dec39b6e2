// What Config says about itself: one value with its origin, and a few lines for a whole file of
// DeepSpeed's keys.
#include <array>

#include "tessera/core/config.h"
#include "tessera/core/deepspeed_config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

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

void append(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}

}  // namespace

std::string Config::shown(std::string_view name) const {
  const Option* const option = find_option(name);
  TESSERA_INVARIANT(option != nullptr, "no option is called ", name);
  const auto found = settings_.find(name);
  if (found == settings_.end()) {
    return detail::concat(name, " = ", to_text(*option, default_value(*option)), " (a default)");
  }
  const Setting& setting = found->second;
  std::string origin = setting.origin;
  if (setting.kind == Origin::kDeepSpeedDefault) {
    origin = "a default, DeepSpeed's";
  } else if (setting.kind == Origin::kOwnKey) {
    origin.resize(origin.size() - std::string_view(": ").size() - name.size());  // the file alone
  }
  return detail::concat(name, " = ", to_text(*option, setting.value), " (", origin, ")");
}

// "batch.total = 8 (--batch, not train_batch_size = 16)".
std::string Config::notice_of(const Option& option, const Setting& setting) const {
  const std::string text = detail::concat(option.name, " = ", to_text(option, setting.value));
  if (setting.kind == Origin::kLater) {
    return detail::concat(text, " (", setting.origin, ", not ", short_key(setting.replaced), ")");
  }
  const bool is_raised = setting.kind == Origin::kDeepSpeed && setting.least_bytes > 0 &&
                         setting.value == OptionValue(setting.least_bytes);
  return is_raised ? detail::concat(text, " (the least, for ", short_key(setting.from), ")") : text;
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
      const auto found = settings_.find(option.name);
      if (found == settings_.end() || subject_of(option.name) != subject) {
        continue;
      }
      const Setting& setting = found->second;
      const bool differs = setting.value != default_value(option);
      if (!setting.replaced.empty() || (setting.kind == Origin::kDeepSpeed && differs)) {
        append(given, notice_of(option, setting));
      } else if (setting.kind == Origin::kDeepSpeedDefault && differs) {
        append(defaults, notice_of(option, setting));
      }
    }
    if (!defaults.empty()) {
      given += (given.empty() ? "DeepSpeed's defaults: " : "; DeepSpeed's defaults: ") + defaults;
    }
    if (!given.empty()) {
      lines.push_back(detail::concat(subject, ": ", given));
    }
  }
  lines.insert(lines.end(), notices_.begin(), notices_.end());
  return lines;
}

std::vector<std::string> Config::unread() const {
  std::vector<std::string> names;
  for (const Option& option : option_table()) {
    const auto found = settings_.find(option.name);
    if (option.read_by.empty() && found != settings_.end() &&
        found->second.kind != Origin::kDeepSpeedDefault &&
        found->second.value != default_value(option)) {
      names.push_back(detail::concat(option.name, " (", found->second.origin, ")"));
    }
  }
  return names;
}

}  // namespace tessera
