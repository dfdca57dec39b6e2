#include "tessera/engine/inspection.h"

#include <ATen/core/Tensor.h>

#include "tessera/engine/engine.h"

namespace tessera {
namespace {

ParamReport report_of(const Engine& engine, int id) {
  const shard::Param& param = engine.param(id);
  const shard::Layout& layout = param.layout();
  ParamReport report;
  report.id = id;
  report.name = param.name();
  report.trainable = param.trainable();
  report.dynamic = param.dynamic();
  report.persists = engine.coordinator().persists(id);
  report.dtype = layout.dtype();
  report.sizes = engine.tensor(id).sizes().vec();
  report.group = engine.group().name();
  report.rank = engine.group().rank();
  report.num_ranks = layout.num_ranks();
  report.numel = layout.numel();
  report.shard_numel = layout.shard_numel();
  report.padded_numel = layout.padded_numel();
  report.shard_bytes = static_cast<std::int64_t>(layout.shard_bytes());
  report.full_bytes = static_cast<std::int64_t>(layout.full_bytes());
  report.tier = engine.shard_tier();
  report.state = param.state();
  report.version = param.version();
  report.num_users = param.num_users();
  return report;
}

UnitReport report_of(const coordinator::Coordinator& coordinator, coordinator::UnitId id) {
  const coordinator::UnitReport known = coordinator.report(id);
  const coordinator::UnitInfo& info = *known.info;
  UnitReport report;
  report.name = info.name;
  report.type = info.traits.type;
  report.own = info.own_ids;
  report.external = info.external;
  report.dynamic = info.traits.dynamic;
  report.is_leaf = info.is_leaf;
  report.inside_leaf = info.leaf < 0 ? std::string() : coordinator.unit_name(info.leaf);
  report.is_open = known.is_open;
  report.forward = known.forward;
  report.backward = known.backward;
  report.inference = known.inference;
  return report;
}

}  // namespace

Inspection inspect(const Engine& engine) {
  Inspection inspection;
  for (int id = 0; id < engine.num_params(); ++id) {
    inspection.params.push_back(report_of(engine, id));
  }
  const coordinator::Coordinator& coordinator = engine.coordinator();
  for (std::size_t i = 0; i < coordinator.num_units(); ++i) {
    const UnitReport& unit =
        inspection.units.emplace_back(report_of(coordinator, static_cast<coordinator::UnitId>(i)));
    for (const std::vector<int>* ids : {&unit.own, &unit.external}) {
      for (const int id : *ids) {
        ++inspection.params[static_cast<std::size_t>(id)].num_units;
      }
    }
  }
  return inspection;
}

}  // namespace tessera
