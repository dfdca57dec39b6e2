#include "cli/inspect_report.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/inspect_tiers.h"
#include "cli/progress.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string limit_text(std::int64_t bytes) {
  // The option's largest value is a little below that of its type.
  return bytes >= INT64_MAX / 2 ? "unlimited" : approximate_bytes(bytes);
}

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  return fmt::format("{}", fmt::join(sizes, " x "));
}

// --- the table of units ---

constexpr const char* kRow = "{:<30}{:>16}{:>18}{:>12}{:>12}  {}\n";

class UnitsText {
 public:
  explicit UnitsText(const InspectResult& result)
      : model_(result.input.model), plan_(result.plan) {}

  std::string text() const {
    std::string text = row("unit, parameter", "sizes", "elements", "full", "shard", "");
    for (std::size_t first = 0; first < model_.units.size();) {
      std::size_t end = first + 1;
      while (end < model_.units.size() && are_alike(first, end)) {
        ++end;
      }
      text += unit_text(first, end);
      first = end;
    }
    return text + row("all", "", grouped(plan_.numel), approximate_bytes(plan_.full_bytes),
                      approximate_bytes(plan_.shard_bytes), "");
  }

 private:
  static std::string row(const std::string& name, const std::string& sizes,
                         const std::string& elements, const std::string& full,
                         const std::string& shard, const std::string& notes) {
    std::string line = fmt::format(kRow, name, sizes, elements, full, shard, notes);
    line.erase(line.find_last_not_of(" \n") + 1);
    return line + "\n";
  }

  bool are_alike(std::size_t left, std::size_t right) const {
    const models::UnitShape& a = model_.units[left];
    const models::UnitShape& b = model_.units[right];
    return a.external == b.external &&
           std::equal(a.own.begin(), a.own.end(), b.own.begin(), b.own.end(),
                      [&](int x, int y) { return are_alike_params(x, y); });
  }
  bool are_alike_params(int left, int right) const {
    const models::ParamShape& a = model_.params[index_of(left)];
    const models::ParamShape& b = model_.params[index_of(right)];
    return a.sizes == b.sizes && a.trainable == b.trainable &&
           plan_.persists[index_of(left)] == plan_.persists[index_of(right)] &&
           plan_.num_units[index_of(left)] == plan_.num_units[index_of(right)];
  }

  std::string unit_text(std::size_t first, std::size_t end) const {
    const models::UnitShape& shape = model_.units[first];
    const StepPlan::Unit& unit = plan_.units[first];
    std::int64_t numel = 0;
    for (const int id : unit.params) {
      numel += plan_.layouts[index_of(id)].numel();
    }
    const bool is_alone = end == first + 1;
    std::string text =
        row(is_alone ? shape.name : shape.name + " to " + model_.units[end - 1].name, "",
            grouped(numel), approximate_bytes(unit.full_bytes), approximate_bytes(unit.shard_bytes),
            is_alone ? "" : fmt::format("each of {}", end - first));
    const std::size_t prefix = num_common(shape);
    for (const int id : shape.own) {
      text += param_text(id, prefix, notes_of(id));
    }
    for (const int id : shape.external) {
      const std::string& owner = model_.units[index_of(plan_.owners[index_of(id)])].name;
      text += param_text(id, 0, "external: of " + owner);
    }
    return text;
  }

  std::string notes_of(int id) const {
    std::string notes = plan_.persists[index_of(id)] ? "persists" : "";
    const auto add = [&](const std::string& note) { notes += (notes.empty() ? "" : ", ") + note; };
    if (!model_.params[index_of(id)].trainable) {
      const shard::StoredFormat format = plan_.layouts[index_of(id)].format();
      add(format.is_encoded() ? "frozen, " + shard::describe(format) : "frozen");
    }
    if (plan_.num_units[index_of(id)] > 1) {
      add(fmt::format("tied: {} units", plan_.num_units[index_of(id)]));
    }
    return notes;
  }

  // Characters that names inside the unit need not repeat: "blocks.3.", or none.
  std::size_t num_common(const models::UnitShape& unit) const {
    const std::string prefix = unit.name + ".";
    const bool is_common = std::all_of(unit.own.begin(), unit.own.end(), [&](int id) {
      return model_.params[index_of(id)].name.starts_with(prefix);
    });
    return is_common ? prefix.size() : 0;
  }

  std::string param_text(int id, std::size_t prefix, const std::string& notes) const {
    const models::ParamShape& param = model_.params[index_of(id)];
    const shard::Layout& layout = plan_.layouts[index_of(id)];
    return row("  " + param.name.substr(prefix), sizes_text(param.sizes), grouped(layout.numel()),
               approximate_bytes(layout.full_bytes()), approximate_bytes(layout.shard_bytes()),
               notes);
  }

  const models::ModelShape& model_;
  const StepPlan& plan_;
};

// --- the timeline ---

class TimelineText {
 public:
  explicit TimelineText(const InspectResult& result)
      : model_(result.input.model),
        plan_(result.plan),
        limit_bytes_(result.input.options.budgets.live_limit_bytes) {}

  std::string text() const {
    std::vector<Row> rows{
        {"use", "phase", "unit", "gather now", "gather ahead", "release", "held"}};
    if (!plan_.before.empty()) {
      rows.push_back({"", "before", "-", "-", calls_text(plan_.before), "-", "-"});
    }
    for (std::size_t i = 0; i < plan_.uses.size(); ++i) {
      const TimelineUse& use = plan_.uses[i];
      rows.push_back({std::to_string(i), std::string(coordinator::to_string(use.use.phase)),
                      model_.units[index_of(use.use.unit)].name,
                      use.demand.params.empty() ? "-" : call_text(use.demand),
                      calls_text(use.ahead), params_text(use.release), held_text(use)});
    }
    std::array<std::size_t, std::tuple_size_v<Row>> width{};
    for (const Row& row : rows) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        width[i] = std::max(width[i], row[i].size());
      }
    }
    std::string text;
    for (const Row& row : rows) {
      text += fmt::format("{:>{}}", row[0], width[0] + 2);
      for (std::size_t i = 1; i + 1 < row.size(); ++i) {
        text += fmt::format("  {:<{}}", row[i], width[i]);
      }
      text += "  " + row.back() + "\n";
    }
    return text;
  }

 private:
  using Row = std::array<std::string, 7>;
  static constexpr std::size_t kMostUnitsTold = 6;

  std::string held_text(const TimelineUse& use) const {
    const std::string held = approximate_bytes(use.held_bytes);
    return plan_.arena_bytes > 0 ? held + " of " + limit_text(limit_bytes_) : held;
  }

  // "blocks.3 + blocks.4", "blocks.3 (2 of 12)": parameters by the unit that owns them. Many units
  // are told by the first and the last.
  std::string params_text(const std::vector<int>& params) const {
    std::map<int, std::size_t> counts;  // by unit
    for (const int id : params) {
      ++counts[plan_.owners[index_of(id)]];
    }
    if (counts.size() > kMostUnitsTold) {
      return fmt::format("{} .. {} ({} units)", model_.units[index_of(counts.begin()->first)].name,
                         model_.units[index_of(counts.rbegin()->first)].name, counts.size());
    }
    std::string text;
    for (const auto& [unit, count] : counts) {
      const std::vector<int>& own = model_.units[index_of(unit)].own;
      const auto num_passing = static_cast<std::size_t>(std::count_if(
          own.begin(), own.end(), [&](int id) { return !plan_.persists[index_of(id)]; }));
      text += (text.empty() ? "" : " + ") + model_.units[index_of(unit)].name;
      // All but what persists is as good as all.
      if (count != own.size() && count != num_passing) {
        text += fmt::format(" ({} of {})", count, own.size());
      }
    }
    return text.empty() ? "-" : text;
  }
  std::string call_text(const GatherCall& call) const {
    return fmt::format("{} [{}]", params_text(call.params), approximate_bytes(call.bytes));
  }
  std::string calls_text(const std::vector<GatherCall>& calls) const {
    if (calls.empty()) {
      return "-";
    }
    GatherCall all;
    for (const GatherCall& call : calls) {
      all.params.insert(all.params.end(), call.params.begin(), call.params.end());
      all.bytes += call.bytes;
    }
    return call_text(all) + (calls.size() == 1 ? "" : fmt::format(" in {} calls", calls.size()));
  }

  const models::ModelShape& model_;
  const StepPlan& plan_;
  const std::int64_t limit_bytes_;
};

std::string limits_text(const InspectResult& result) {
  const coordinator::CoordinatorOptions& options = result.input.options;
  const StepPlan& plan = result.plan;
  const comm::Mesh& mesh = result.input.mesh;
  if (mesh.shard_size() == 1 && plan.arena_bytes == 0) {
    return mesh.num_ranks() > 1
               ? "Every rank has a whole copy: nothing is gathered.\n"
               : "One rank: a shard is the full parameter, and nothing is gathered.\n";
  }
  return fmt::format(
             "Each rank: {} of shards, {} of memory for full parameters; {} of them persist\n",
             approximate_bytes(plan.shard_bytes), approximate_bytes(plan.arena_bytes),
             approximate_bytes(plan.persistent_bytes)) +
         fmt::format("Limits: live {}, reuse distance {}, {} per prefetch, {} gathers in flight\n",
                     limit_text(options.budgets.live_limit_bytes),
                     limit_text(options.budgets.reuse_distance_bytes),
                     limit_text(options.budgets.bucket_bytes), options.budgets.max_inflight);
}

// --- JSON ---

Json names_of(const std::vector<int>& params, const models::ModelShape& model) {
  Json names = Json::array();
  for (const int id : params) {
    names.push_back(model.params[index_of(id)].name);
  }
  return names;
}

Json call_json(const GatherCall& call, const models::ModelShape& model) {
  return {{"params", names_of(call.params, model)}, {"bytes", call.bytes}};
}

Json calls_json(const std::vector<GatherCall>& calls, const models::ModelShape& model) {
  Json list = Json::array();
  for (const GatherCall& call : calls) {
    list.push_back(call_json(call, model));
  }
  return list;
}

Json units_json(const InspectResult& result) {
  const models::ModelShape& model = result.input.model;
  Json list = Json::array();
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    list.push_back({{"name", model.units[i].name},
                    {"own", names_of(model.units[i].own, model)},
                    {"external", names_of(model.units[i].external, model)},
                    {"full_bytes", result.plan.units[i].full_bytes},
                    {"shard_bytes", result.plan.units[i].shard_bytes}});
  }
  return list;
}

Json params_json(const InspectResult& result) {
  const models::ModelShape& model = result.input.model;
  const StepPlan& plan = result.plan;
  Json list = Json::array();
  for (std::size_t id = 0; id < model.params.size(); ++id) {
    const shard::Layout& layout = plan.layouts[id];
    list.push_back({{"id", id},
                    {"name", model.params[id].name},
                    {"unit", model.units[index_of(plan.owners[id])].name},
                    {"num_units", plan.num_units[id]},
                    {"sizes", model.params[id].sizes},
                    {"trainable", model.params[id].trainable},
                    {"persists", static_cast<bool>(plan.persists[id])},
                    {"numel", layout.numel()},
                    {"shard_numel", layout.shard_numel()},
                    {"padded_numel", layout.padded_numel()},
                    {"shard_bytes", layout.shard_bytes()},
                    {"full_bytes", layout.full_bytes()}});
  }
  return list;
}

Json timeline_json(const InspectResult& result) {
  const models::ModelShape& model = result.input.model;
  Json list = Json::array();
  for (std::size_t i = 0; i < result.plan.uses.size(); ++i) {
    const TimelineUse& use = result.plan.uses[i];
    list.push_back({{"index", i},
                    {"phase", coordinator::to_string(use.use.phase)},
                    {"unit", model.units[index_of(use.use.unit)].name},
                    {"gather_now", call_json(use.demand, model)},
                    {"gather_ahead", calls_json(use.ahead, model)},
                    {"release", names_of(use.release, model)},
                    {"held_bytes", use.held_bytes}});
  }
  return list;
}

std::int64_t trainable_numel(const models::ModelShape& model) {
  std::int64_t numel = 0;
  for (const models::ParamShape& param : model.params) {
    numel += param.trainable ? param.numel() : 0;
  }
  return numel;
}

const TrainMemory* told_memory(const InspectResult& result) {
  const StepPlanInput& input = result.input;
  return input.memory ? &*input.memory : input.resident ? &*input.resident : nullptr;
}

}  // namespace

std::string inspect_screen(const InspectResult& result) {
  const models::ModelShape& model = result.input.model;
  const StepTotals& step = result.plan.step;
  const std::int64_t num_micro = result.input.num_micro_batches;
  std::string text =
      fmt::format("{} in {} over {} rank{}: {} units, {} parameters\n\n", result.preset,
                  to_string(model.dtype), result.input.mesh.num_ranks(),
                  plural(result.input.mesh.num_ranks()), model.units.size(), model.params.size());
  text += UnitsText(result).text() + trained_text(result.input.shapes) + "\n" + limits_text(result);
  if (const std::string mesh = mesh_screen(result.meshes); !mesh.empty()) {
    text += "\n" + mesh;
  }
  if (const TrainMemory* const memory = told_memory(result)) {
    text += "\n" + tiers_screen(*memory);
    if (memory->plan.uses_nvme) {
      text += result.input.disk_s
                  ? fmt::format("the disk takes at least {:.2f} s per step, as it was measured\n",
                                *result.input.disk_s)
                  : "no time is predicted: the disk has not been measured; a run measures it\n";
    }
  }
  text += fmt::format("\nA step of {} micro-batch{}, from the second step on:\n", num_micro,
                      num_micro == 1 ? "" : "es");
  text += TimelineText(result).text();
  return text + fmt::format("\nPer step: {} gather{}, {}; at most {} held; {} miss{}\n",
                            step.num_gathers, plural(step.num_gathers),
                            approximate_bytes(step.gathered_bytes),
                            approximate_bytes(step.peak_bytes), step.num_misses,
                            step.num_misses == 1 ? "" : "es");
}

std::string inspect_json(const InspectResult& result) {
  const coordinator::CoordinatorOptions& options = result.input.options;
  const StepPlan& plan = result.plan;
  Json document{{"preset", result.preset},
                {"precision", to_string(result.input.model.dtype)},
                {"num_ranks", result.input.mesh.num_ranks()},
                {"num_micro_batches", result.input.num_micro_batches},
                {"limits",
                 {{"live_bytes", options.budgets.live_limit_bytes},
                  {"reuse_distance_bytes", options.budgets.reuse_distance_bytes},
                  {"bucket_bytes", options.budgets.bucket_bytes},
                  {"max_inflight", options.budgets.max_inflight},
                  {"persist_param_bytes", options.persist_param_bytes},
                  {"persist_model_bytes", options.persist_model_bytes}}},
                {"units", units_json(result)},
                {"params", params_json(result)},
                {"totals",
                 {{"numel", plan.numel},
                  {"trainable_numel", trainable_numel(result.input.model)},
                  {"frozen_numel", plan.numel - trainable_numel(result.input.model)},
                  {"full_bytes", plan.full_bytes},
                  {"shard_bytes", plan.shard_bytes},
                  {"persistent_bytes", plan.persistent_bytes},
                  {"arena_bytes", plan.arena_bytes}}},
                {"before_step", calls_json(plan.before, result.input.model)},
                {"timeline", timeline_json(result)},
                {"step",
                 {{"num_gathers", plan.step.num_gathers},
                  {"gathered_bytes", plan.step.gathered_bytes},
                  {"num_misses", plan.step.num_misses},
                  {"peak_bytes", plan.step.peak_bytes}}}};
  document["mesh"] = mesh_json(result.meshes);
  if (const TrainMemory* const memory = told_memory(result)) {
    document["tiers"] = tiers_json(*memory);
    if (result.input.disk_s) {
      document["tiers"]["disk_s"] = *result.input.disk_s;
    }
  }
  return document.dump(2) + "\n";
}

}  // namespace tessera::cli
