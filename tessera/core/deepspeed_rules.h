// DeepSpeed's keys that follow rules of their own, and combinations that are refused; internal to
// core, used by the other deepspeed_*.cpp alone.
//
// Threads: stateless.
#pragma once

#include <string>
#include <string_view>

#include "tessera/core/deepspeed_config.h"

namespace tessera {

// A key with DeepSpeed's spelling, read with the type that the table gives it.
class DeepSpeedView {
 public:
  DeepSpeedView(const DeepSpeedInput& input, std::string_view source)
      : input_(input), source_(source) {}

  bool has(std::string_view path) const { return input_.values.count(path) != 0; }
  bool is_auto(std::string_view path) const { return input_.autos.count(path) != 0; }
  bool has_block(std::string_view path) const { return input_.blocks.count(path) != 0; }
  bool flag(std::string_view path, bool otherwise = false) const;
  std::int64_t integer(std::string_view path, std::int64_t otherwise) const;
  double real(std::string_view path, double otherwise) const;
  std::string text(std::string_view path, std::string_view otherwise = "") const;
  // `key = value`, as it stands in the file.
  std::string shown(std::string_view path) const;
  std::string where(std::string_view path) const;

  const DeepSpeedInput& input() const { return input_; }

 private:
  OptionValue typed(std::string_view path) const;

  const DeepSpeedInput& input_;
  const std::string source_;
};

// Sets `option` because of `key`, which the file gives.
void add_setting(DeepSpeedTranslation& out, const DeepSpeedView& view, std::string_view key,
                 std::string_view option, const OptionValue& value);

// Adds what the keys of kind kSpecial set.
void apply_special_keys(const DeepSpeedView& view, DeepSpeedTranslation& out);

// Throws ConfigError for combinations that cannot work.
void check_combinations(const DeepSpeedView& view);

}  // namespace tessera
