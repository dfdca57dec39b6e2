#include "tessera/coordinator/unit_table.h"

#include <algorithm>
#include <utility>

#include "tessera/device/arena_map.h"

namespace tessera::coordinator {
namespace {

std::size_t arena_bytes_of(const shard::Param& param) {
  if (param.shard_is_full()) {
    return 0;
  }
  constexpr std::size_t kStep = device::kArenaAlignment;
  return (param.gathered_bytes() + kStep - 1) / kStep * kStep;
}

// False if it was there.
bool insert(std::vector<int>& ids, int id) {
  const auto place = std::lower_bound(ids.begin(), ids.end(), id);
  if (place != ids.end() && *place == id) {
    return false;
  }
  ids.insert(place, id);
  return true;
}

bool is_inside(const std::string& name, const std::string& outer) {
  return name.size() > outer.size() && name.starts_with(outer) && name[outer.size()] == '.';
}

}  // namespace

std::string describe(const LeafRule& rule) {
  switch (rule.kind) {
    case LeafRule::Kind::kName:
      return detail::concat("name '", rule.text, "'");
    case LeafRule::Kind::kNameSuffix:
      return detail::concat("a name that ends in '", rule.text, "'");
    case LeafRule::Kind::kType:
      return detail::concat("type '", rule.text, "'");
    case LeafRule::Kind::kNumelBelow:
      return detail::concat("at most ", rule.numel, " elements per unit inside");
  }
  return "?";
}

UnitId UnitTable::add(std::string name, const std::vector<int>& params, UnitTraits traits) {
  TESSERA_INVARIANT(!is_finalized_, "unit '", name, "' is added after the first use");
  UnitInfo unit;
  unit.name = std::move(name);
  unit.traits = std::move(traits);
  units_.push_back(std::move(unit));
  const auto id = static_cast<UnitId>(units_.size() - 1);
  for (const int param : params) {
    check_param(id, param);
    insert(units_.back().own_ids, param);
    insert(units_.back().ids, param);
  }
  return id;
}

void UnitTable::add_param(UnitId id, int param) {
  check_param(id, param);
  UnitInfo& unit = units_[static_cast<std::size_t>(id)];
  if (insert(unit.ids, param)) {
    insert(unit.external, param);
  }
}

void UnitTable::check_param(UnitId id, int param) const {
  const std::string& name = (*this)[id].name;
  TESSERA_INVARIANT(param >= 0 && param < params_.num_params(), "unit '", name,
                    "' names parameter ", param, "; there are ", params_.num_params());
  TESSERA_INVARIANT(!is_finalized_, "parameter '", params_[param].name(), "' is added to unit '",
                    name, "' after the first use");
}

bool UnitTable::matches(const UnitInfo& unit, const LeafRule& rule) const {
  switch (rule.kind) {
    case LeafRule::Kind::kName:
      return unit.name == rule.text;
    case LeafRule::Kind::kNameSuffix:
      return unit.name.ends_with(rule.text);
    case LeafRule::Kind::kType:
      return unit.traits.type == rule.text;
    case LeafRule::Kind::kNumelBelow:
      break;
  }
  std::vector<int> ids = unit.own_ids;
  std::int64_t num_inside = 0;
  for (const UnitInfo& other : units_) {
    if (is_inside(other.name, unit.name)) {
      ++num_inside;
      for (const int id : other.own_ids) {
        insert(ids, id);
      }
    }
  }
  std::int64_t numel = 0;
  for (const int id : ids) {
    numel += params_[id].layout().numel();
  }
  return num_inside > 0 && numel / (1 + num_inside) <= rule.numel;
}

void UnitTable::mark_leaves(const LeafRule& rule, bool is_leaf) {
  TESSERA_CHECK(!is_finalized_, ConfigError, "leaf units are chosen after the first forward (",
                describe(rule), "); choose them before it");
  bool is_found = false;
  for (UnitInfo& unit : units_) {
    if (matches(unit, rule)) {
      unit.is_leaf = is_leaf;
      is_found = true;
    }
  }
  TESSERA_CHECK(is_found, ConfigError, "none of ", units_.size(), " units matches ", describe(rule),
                "; check its spelling");
}

std::vector<std::string> UnitTable::leaves() const {
  std::vector<std::string> names;
  for (const UnitInfo& unit : units_) {
    if (unit.is_leaf) {
      names.push_back(unit.name);
    }
  }
  return names;
}

std::string UnitTable::text_of(const Use& use) const {
  return detail::concat("the ", to_string(use.phase), " of unit '", (*this)[use.unit].name, "'");
}

void UnitTable::expand_leaves() {
  if (std::exchange(has_expanded_, true)) {
    return;
  }
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (!units_[i].is_leaf) {
      continue;
    }
    for (UnitInfo& other : units_) {
      if (!is_inside(other.name, units_[i].name)) {
        continue;
      }
      if (other.leaf < 0 || (*this)[other.leaf].name.size() > units_[i].name.size()) {
        other.leaf = static_cast<UnitId>(i);
      }
      for (const int id : other.ids) {
        insert(units_[i].ids, id);
      }
    }
  }
}

void UnitTable::finalize(Spans& spans) {
  expand_leaves();
  owners_.assign(static_cast<std::size_t>(params_.num_params()), -1);
  for (std::size_t i = units_.size(); i-- > 0;) {
    UnitInfo& unit = units_[i];
    unit.label = spans.intern(unit.name);
    unit.text = unit.ids.empty()
                    ? unit.name
                    : detail::concat(unit.name, " (", params_[unit.ids.front()].name(), ")");
    for (const int id : unit.ids) {
      unit.params.push_back(&params_[id]);
      unit.bytes += full_bytes_of(params_[id]);
      owners_[static_cast<std::size_t>(id)] = static_cast<UnitId>(i);
    }
  }
  follow_placements();
  is_finalized_ = true;
}

void UnitTable::follow_placements() {
  for (UnitInfo& unit : units_) {
    unit.mixed.clear();
    unit.planned.clear();
    unit.direct.clear();
    unit.gathered_bytes = 0;
    for (const int id : unit.ids) {
      if (params_[id].shard_is_full()) {
        unit.direct.push_back(&params_[id]);
      } else {
        unit.gathered_bytes += full_bytes_of(params_[id]);
      }
    }
  }
  set_mixed_apart();
}

std::vector<std::int64_t> UnitTable::param_bytes() const {
  std::vector<std::int64_t> bytes;
  for (int id = 0; id < params_.num_params(); ++id) {
    bytes.push_back(params_[id].shard_is_full() ? 0 : full_bytes_of(params_[id]));
  }
  return bytes;
}

std::vector<std::vector<int>> UnitTable::planned_ids() const {
  std::vector<std::vector<int>> ids;
  for (const UnitInfo& unit : units_) {
    ids.push_back(unit.planned);
  }
  return ids;
}

void UnitTable::set_mixed_apart() {
  std::vector<bool> is_in_dynamic(static_cast<std::size_t>(params_.num_params()));
  for (const UnitInfo& unit : units_) {
    for (const int id : unit.ids) {
      if (unit.traits.dynamic && params_.num_ranks() > 1) {
        is_in_dynamic[static_cast<std::size_t>(id)] = true;
      }
    }
  }
  for (UnitInfo& unit : units_) {
    for (const int id : unit.ids) {
      if (params_[id].shard_is_full()) {
        continue;
      }
      const bool is_mixed = !unit.traits.dynamic && is_in_dynamic[static_cast<std::size_t>(id)];
      (is_mixed ? unit.mixed : unit.planned).push_back(id);
    }
  }
}

std::int64_t UnitTable::largest_bytes(bool dynamic) const {
  std::int64_t largest = 0;
  for (const UnitInfo& unit : units_) {
    if ((unit.traits.dynamic && params_.num_ranks() > 1) == dynamic) {
      largest = std::max(largest, unit.gathered_bytes);
    }
  }
  return largest;
}

bool UnitTable::has_dynamic() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const UnitInfo& unit) { return unit.traits.dynamic; });
}

std::size_t UnitTable::arena_bytes(std::int64_t live_limit_bytes) const {
  std::size_t all = 0;
  std::size_t rounding = 0;
  for (int id = 0; id < params_.num_params(); ++id) {
    const std::size_t bytes = arena_bytes_of(params_[id]);
    all += bytes;
    rounding += bytes > 0 ? bytes - params_[id].gathered_bytes() : 0;
  }
  std::size_t largest_unit = 0;
  for (const UnitInfo& unit : units_) {
    std::size_t bytes = 0;
    for (const shard::Param* param : unit.params) {
      bytes += arena_bytes_of(*param);
    }
    largest_unit = std::max(largest_unit, bytes);
  }
  // The limit may be "unlimited": nothing is added to it before it is compared.
  const auto limit = static_cast<std::size_t>(live_limit_bytes);
  return (limit >= all ? all : std::min(limit + rounding, all)) + largest_unit;
}

}  // namespace tessera::coordinator
