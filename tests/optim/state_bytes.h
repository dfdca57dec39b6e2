// The states of a parameter as bytes, for comparisons to the bit.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

// Master and states of the rule, behind what is in `all`.
inline void append_states(Optimizer& optimizer, const RuleOptions& rule, int id,
                          std::vector<std::vector<std::byte>>& all) {
  std::vector<std::string_view> names{"master"};
  const auto states = state_names(rule);
  names.insert(names.end(), states.begin(), states.end());
  for (const std::string_view name : names) {
    const std::span<float> values = optimizer.state(id, name);
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    all.emplace_back(begin, begin + values.size_bytes());
  }
}

}  // namespace tessera::optim
