// Which units are leaves: gathered whole, with everything inside them, when they begin.
//
// A leaf is for a unit whose inner units are small or are used in an order that changes: one gather
// in place of many. Inside a unit are those whose name goes on after its own with a dot. Rules are
// by name, by the end of the name, by the type of the module, or by size: units whose elements,
// divided by one more than the number of units inside, are at most a threshold; a unit without
// others inside gains nothing and is left out of that rule.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tessera::coordinator {

struct LeafRule {
  enum class Kind : std::uint8_t { kName, kNameSuffix, kType, kNumelBelow };
  Kind kind = Kind::kName;
  std::string text;
  std::int64_t numel = 0;

  static LeafRule name(std::string text) { return {Kind::kName, std::move(text), 0}; }
  static LeafRule suffix(std::string text) { return {Kind::kNameSuffix, std::move(text), 0}; }
  static LeafRule type(std::string text) { return {Kind::kType, std::move(text), 0}; }
  static LeafRule numel_below(std::int64_t numel) { return {Kind::kNumelBelow, {}, numel}; }
};

// "type 'BlockImpl'"
std::string describe(const LeafRule& rule);

}  // namespace tessera::coordinator
