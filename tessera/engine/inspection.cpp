#include "tessera/engine/inspection.h"

#include <sstream>

#include <nlohmann/json.hpp>

#include <ATen/core/Tensor.h>

#include "tessera/core/units.h"
#include "tessera/engine/engine.h"

namespace tessera {
namespace {

ParamReport report_of(const Engine& engine, int id) {
  const shard::Param& param = engine.param(id);
  ParamReport report;
  report.id = id;
  report.name = param.name();
  report.trainable = param.trainable();
  report.dynamic = param.dynamic();
  report.persists = engine.coordinator().persists(id);
  report.sizes = engine.tensor(id).sizes().vec();
  report.group = engine.shard_group().name();
  report.rank = engine.shard_group().rank();
  report.layout = param.layout();
  report.placement = param.placement();
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

using Json = nlohmann::ordered_json;

const ParamReport& param_of(const Inspection& inspection, int id) {
  return inspection.params[static_cast<std::size_t>(id)];
}

// "[128, 64]"
std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

void write_param(std::ostream& out, const ParamReport& param, bool is_external) {
  const shard::Layout& layout = param.layout;
  out << "  " << param.name << " " << to_string(layout.dtype()) << " " << sizes_text(param.sizes)
      << ": " << (param.trainable ? "trainable" : "frozen") << (param.dynamic ? ", dynamic" : "")
      << (is_external ? ", external" : "");
  if (param.num_units > 1) {
    out << ", of " << param.num_units << " units";
  }
  out << (param.persists ? ", persists" : "") << "; rank " << param.rank << " of "
      << layout.num_ranks() << " in '" << param.group << "' has " << layout.shard_numel() << " of "
      << layout.padded_numel() << " padded elements (" << approximate_bytes(layout.shard_bytes())
      << " of " << approximate_bytes(layout.full_bytes()) << ") on "
      << to_string(param.placement.parameter) << "; " << to_string(param.state) << ", "
      << param.num_users << " users, version " << param.version << "\n";
}

void write_counts(std::ostream& out, const char* phase, const coordinator::GatherCounts& counts) {
  if (counts.hits + counts.misses + counts.demand_calls + counts.prefetch_calls == 0) {
    return;
  }
  out << "  " << phase << ": " << counts.hits << " hits, " << counts.misses << " misses, "
      << counts.drops << " drops; " << counts.demand_calls << " gathers on demand, "
      << counts.prefetch_calls << " ahead, "
      << approximate_bytes(counts.demand_bytes + counts.prefetch_bytes) << "\n";
}

Json counts_json(const coordinator::GatherCounts& counts) {
  return {{"hits", counts.hits},
          {"misses", counts.misses},
          {"missed_uses", counts.missed_uses},
          {"drops", counts.drops},
          {"demand_calls", counts.demand_calls},
          {"prefetch_calls", counts.prefetch_calls},
          {"demand_bytes", counts.demand_bytes},
          {"prefetch_bytes", counts.prefetch_bytes},
          {"demand_submit_s", counts.demand_submit_s},
          {"prefetch_submit_s", counts.prefetch_submit_s},
          {"demand_wait_s", counts.demand_wait_s},
          {"prefetch_wait_s", counts.prefetch_wait_s}};
}

Json param_json(const ParamReport& param) {
  return {{"id", param.id},
          {"name", param.name},
          {"trainable", param.trainable},
          {"dynamic", param.dynamic},
          {"num_units", param.num_units},
          {"persists", param.persists},
          {"dtype", to_string(param.layout.dtype())},
          {"sizes", param.sizes},
          {"group", param.group},
          {"rank", param.rank},
          {"num_ranks", param.layout.num_ranks()},
          {"numel", param.layout.numel()},
          {"shard_numel", param.layout.shard_numel()},
          {"padded_numel", param.layout.padded_numel()},
          {"shard_bytes", param.layout.shard_bytes()},
          {"full_bytes", param.layout.full_bytes()},
          {"tier", to_string(param.placement.parameter)},
          {"gradient_tier", to_string(param.placement.gradient)},
          {"states_tier", to_string(param.placement.states)},
          {"updater", param.placement.updater == Updater::kCpu ? "cpu" : "device"},
          {"state", to_string(param.state)},
          {"version", param.version},
          {"num_users", param.num_users}};
}

Json names_json(const Inspection& inspection, const std::vector<int>& ids) {
  Json names = Json::array();
  for (const int id : ids) {
    names.push_back(param_of(inspection, id).name);
  }
  return names;
}

Json unit_json(const Inspection& inspection, const UnitReport& unit) {
  return {{"name", unit.name},
          {"type", unit.type},
          {"own", names_json(inspection, unit.own)},
          {"external", names_json(inspection, unit.external)},
          {"dynamic", unit.dynamic},
          {"is_leaf", unit.is_leaf},
          {"inside_leaf", unit.inside_leaf},
          {"is_open", unit.is_open},
          {"forward", counts_json(unit.forward)},
          {"backward", counts_json(unit.backward)},
          {"inference", counts_json(unit.inference)}};
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

std::string to_text(const Inspection& inspection) {
  std::ostringstream out;
  for (const UnitReport& unit : inspection.units) {
    out << unit.name << (unit.type.empty() ? "" : " (" + unit.type + ")")
        << (unit.dynamic ? ", dynamic" : "") << (unit.is_leaf ? ", leaf" : "")
        << (unit.inside_leaf.empty() ? "" : ", inside leaf '" + unit.inside_leaf + "'")
        << (unit.is_open ? ", in use" : "") << "\n";
    for (const int id : unit.own) {
      write_param(out, param_of(inspection, id), /*is_external=*/false);
    }
    for (const int id : unit.external) {
      write_param(out, param_of(inspection, id), /*is_external=*/true);
    }
    write_counts(out, "forward", unit.forward);
    write_counts(out, "backward", unit.backward);
    write_counts(out, "inference", unit.inference);
  }
  return out.str();
}

std::string to_json(const Inspection& inspection) {
  Json units = Json::array();
  for (const UnitReport& unit : inspection.units) {
    units.push_back(unit_json(inspection, unit));
  }
  Json params = Json::array();
  for (const ParamReport& param : inspection.params) {
    params.push_back(param_json(param));
  }
  return Json{{"units", units}, {"params", params}}.dump(2) + "\n";
}

}  // namespace tessera
