#include "tessera/shard/stored_format.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::shard {

StoredRule StoredRule::from(const Config& config) {
  StoredRule rule;
  rule.format_ = {static_cast<int>(config.get_int("quant.frozen_bits")),
                  config.get_int("quant.block_numel")};
  rule.names_ = config.get_list("quant.frozen_names");
  return rule;
}

StoredFormat StoredRule::format_of(std::string_view name, bool trainable, std::int64_t numel,
                                   int num_dims) const {
  if (!format_.is_encoded() || trainable || num_dims < 2 || numel < format_.step()) {
    return {};
  }
  const bool is_named =
      names_.empty() || std::any_of(names_.begin(), names_.end(), [name](const std::string& each) {
        return matches(each, name);
      });
  return is_named ? format_ : StoredFormat();
}

// A * takes as little as it can, and more when what is behind it does not fit.
bool StoredRule::matches(std::string_view pattern, std::string_view name) {
  std::size_t at = 0;
  std::size_t in_name = 0;
  std::size_t star = std::string_view::npos;
  std::size_t after_star = 0;
  while (in_name < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      after_star = in_name;
    } else if (at < pattern.size() && pattern[at] == name[in_name]) {
      ++at;
      ++in_name;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      in_name = ++after_star;
    } else {
      return false;
    }
  }
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(at), pattern.end(),
                     [](char each) { return each == '*'; });
}

std::string describe(StoredFormat format) {
  return format.is_encoded() ? quant::to_string(format.blocks()) : "elements";
}

}  // namespace tessera::shard
