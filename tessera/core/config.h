// The options of a run: Tessera's own names, or DeepSpeed's, from a JSON file, code or flags.
//
// Later settings win: a file, then set() and apply_flag() in the order of the calls. Inside one
// file the same option under two names must have one value. Whatever is wrong with input is a
// one-line ConfigError that names source, key, value and what is allowed; a name in code that is
// not in the table (option_table.h) is an InternalError.
//
// A value is always one that the table allows. Rules between options are checked by check(), which
// a program calls once, after its last setting.
//
// Threads: const methods from any thread while nobody changes it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/option_value.h"

namespace tessera {

struct DeepSpeedSetting;

class Config {
 public:
  Config() = default;
  // `source_name` is how errors call the text.
  static Config from_json(std::string_view text, std::string_view source_name);
  static Config from_file(const std::string& path);

  // set("comm.timeout_s", 30), set("memory.host", "300MiB").
  void set(std::string_view name, const OptionValue& value);
  // "comm.timeout_s=30", as it comes from a command line; the name is user input here.
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
  // Whether anything but the table's default was given, even if it is the same value.
  bool is_set(std::string_view name) const;

  // Lines for the log: conversions of DeepSpeed's keys, keys that were accepted but not needed.
  // Each line once.
  std::vector<std::string> notices() const;
  // One line per option that differs from its default: "name = value  (origin)".
  std::string describe() const;

 private:
  struct Setting {
    OptionValue value;
    std::string origin;
  };
  // A byte option that was given in elements: its value follows the precision.
  struct Elements {
    const Option* option;
    std::int64_t numel;
    std::string from;
    std::string origin;
  };
  const OptionValue& value(std::string_view name, OptionType type) const;
  void assign(const Option& option, OptionValue value, std::string origin);
  void adopt(const std::vector<DeepSpeedSetting>& settings, const std::string& source);
  void adopt_one(const DeepSpeedSetting& setting, const std::string& source);
  void convert_elements();

  std::map<std::string, Setting, std::less<>> settings_;  // only what was given
  std::vector<Elements> elements_;
  std::vector<std::string> notices_;
};

}  // namespace tessera
