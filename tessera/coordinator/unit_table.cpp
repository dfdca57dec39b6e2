#include "tessera/coordinator/unit_table.h"

#include <algorithm>
#include <utility>

#include "tessera/device/arena_map.h"

namespace tessera::coordinator {
namespace {

std::size_t arena_bytes_of(const shard::Param& param) {
  constexpr std::size_t kStep = device::kArenaAlignment;
  return (param.layout().full_bytes() + kStep - 1) / kStep * kStep;
}

}  // namespace

UnitId UnitTable::add(std::string name, const std::vector<int>& params) {
  TESSERA_INVARIANT(!is_sealed_, "unit '", name, "' is added after the first use");
  UnitInfo unit;
  unit.name = std::move(name);
  units_.push_back(std::move(unit));
  const auto id = static_cast<UnitId>(units_.size() - 1);
  for (const int param : params) {
    add_param(id, param);
  }
  return id;
}

void UnitTable::add_param(UnitId id, int param) {
  const std::string& name = (*this)[id].name;
  TESSERA_INVARIANT(param >= 0 && param < params_.num_params(), "unit '", name,
                    "' names parameter ", param, "; there are ", params_.num_params());
  TESSERA_INVARIANT(!is_sealed_, "parameter '", params_[param].name(), "' is added to unit '", name,
                    "' after the first use");
  std::vector<int>& ids = units_[static_cast<std::size_t>(id)].ids;
  const auto place = std::lower_bound(ids.begin(), ids.end(), param);
  if (place == ids.end() || *place != param) {
    ids.insert(place, param);
  }
}

void UnitTable::seal(Spans& spans) {
  owners_.assign(static_cast<std::size_t>(params_.num_params()), -1);
  for (std::size_t i = units_.size(); i-- > 0;) {
    UnitInfo& unit = units_[i];
    unit.label = spans.intern(unit.name);
    for (const int id : unit.ids) {
      unit.params.push_back(&params_[id]);
      unit.bytes += full_bytes_of(params_[id]);
      owners_[static_cast<std::size_t>(id)] = static_cast<UnitId>(i);
    }
  }
  is_sealed_ = true;
}

std::vector<std::int64_t> UnitTable::param_bytes() const {
  std::vector<std::int64_t> bytes;
  for (int id = 0; id < params_.num_params(); ++id) {
    bytes.push_back(full_bytes_of(params_[id]));
  }
  return bytes;
}

std::vector<std::vector<int>> UnitTable::param_ids() const {
  std::vector<std::vector<int>> ids;
  for (const UnitInfo& unit : units_) {
    ids.push_back(unit.ids);
  }
  return ids;
}

std::size_t UnitTable::arena_bytes(std::int64_t live_limit_bytes) const {
  std::size_t all = 0;
  std::size_t rounding = 0;
  for (int id = 0; id < params_.num_params(); ++id) {
    const std::size_t bytes = arena_bytes_of(params_[id]);
    all += bytes;
    rounding += bytes - params_[id].layout().full_bytes();
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
