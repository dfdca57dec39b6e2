// The options of a run: Tessera's own names, or DeepSpeed's, from a JSON file, code or flags.
//
// Later settings win: a file, then set() and apply_flag() in the order of the calls. Inside one
// file the same option under two names must have one value. Whatever is wrong with input is a
// one-line ConfigError that names source, key, value and what is allowed.
//
// A value is always one that the table (option_table.h) allows. Rules between options are checked
// by check(), which a program calls once, after its last setting.
//
// Threads: const methods from any thread while nobody changes it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/option_value.h"

namespace tessera {

enum class SettingOrigin : std::uint8_t { kOwnKey, kDeepSpeed, kDeepSpeedDefault, kLater };

// The value of one option, and where it came from.
struct ConfigSetting {
  const Option* option = nullptr;
  OptionValue value;
  std::string origin;  // "ds.json: train_batch_size", "--batch", "code"
  SettingOrigin kind = SettingOrigin::kLater;
  std::string from = {};      // of DeepSpeed's keys: "train_batch_size = 16"
  std::string replaced = {};  // the same of one that this has replaced
  // Values that follow another option: elements the precision, ratios the learning rate.
  std::optional<std::int64_t> numel = {};
  std::int64_t least_bytes = 0;
  std::optional<double> lr_ratio = {};
};

class Config {
 public:
  Config() = default;
  // `source_name` is how errors call the text.
  static Config from_json(std::string_view text, std::string_view source_name);
  static Config from_file(const std::string& path);

  // set("comm.timeout_s", 30), set("memory.host", "300MiB"). `origin` is what messages say of where
  // the value came from: a flag, "derived".
  void set(std::string_view name, const OptionValue& value, std::string_view origin = "code");
  // "comm.timeout_s=30", as it comes from a command line.
  void apply_flag(std::string_view assignment);

  // Throws ConfigError where options contradict each other.
  void check() const;

  bool get_bool(std::string_view name) const;
  std::int64_t get_int(std::string_view name) const;
  double get_double(std::string_view name) const;
  std::int64_t get_bytes(std::string_view name) const;
  double get_seconds(std::string_view name) const;
  const std::string& get_string(std::string_view name) const;  // also of a choice
  const std::vector<std::string>& get_list(std::string_view name) const;
  // Whether anything but the table's default holds, even if it is the same value.
  bool is_set(std::string_view name) const;
  // Whether somebody wrote it: neither the table's default nor one of DeepSpeed's.
  bool is_given(std::string_view name) const;
  // Whether a file gave it, and nothing has replaced it since.
  bool is_from_file(std::string_view name) const;

  // "batch.total = 16 (ds.json: train_batch_size)"; in the brackets "a default" where it is one.
  std::string shown(std::string_view name) const;
  // Lines for the log: what DeepSpeed's keys have become, under all settings so far. At most eight.
  std::vector<std::string> notices() const;
  // One line per option that differs from its default: "name = value  (origin)".
  std::string describe() const;
  // The same as text by name.
  std::map<std::string, std::string> changed() const;
  // Options that somebody gave another value than the default, and that nothing reads yet:
  // "quant.weights (ds.json: zero_optimization.zero_quantized_weights)".
  std::vector<std::string> unread() const;

 private:
  const OptionValue& value(std::string_view name, OptionType type) const;
  const ConfigSetting* find(std::string_view name) const;  // null: the default holds
  void assign(ConfigSetting setting);
  void adopt(ConfigSetting setting);
  OptionValue following_value(const ConfigSetting& setting) const;

  std::map<std::string_view, ConfigSetting> settings_;  // by the table's names; only what was given
  std::string deepspeed_source_;                        // empty: no key of DeepSpeed's
  std::vector<std::string> deepspeed_notices_;          // of keys that set nothing
};

}  // namespace tessera
