#include "cli/inspect_tiers.h"

#include <array>
#include <vector>

#include <fmt/format.h>

#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;
using planner::PlannedExtent;

constexpr std::int64_t kShownPerRole = 6;

std::vector<PlannedExtent> extents_of(const TrainMemory& memory) {
  return planner::planned_extents(memory.shapes, memory.options, memory.plan, memory.state_names);
}

const std::string& name_of(const TrainMemory& memory, int param) {
  return memory.shapes.params[static_cast<std::size_t>(param)].name;
}

std::string what_text(const TrainMemory& memory, const PlannedExtent& extent) {
  std::string text = name_of(memory, extent.param);
  if (!extent.tensor.empty()) {
    text = extent.tensor + " of " + text;
  }
  return extent.begin == 0 ? text : fmt::format("{}, from element {}", text, extent.begin);
}

}  // namespace

std::string tiers_screen(const TrainMemory& memory) {
  const planner::MemoryPlan& plan = memory.plan;
  std::string text = plan.text() + activations_text(memory);
  if (memory.options.cpu_share < 0 && plan.update.streamed + plan.update.cpu > 0) {
    text += "who updates is as without measured rates; training measures them, or --cpu-share\n";
  }
  const std::vector<PlannedExtent> extents = extents_of(memory);
  if (extents.empty()) {
    return text;
  }
  constexpr const char* kRow = "{:<12}{:>16}{:>14}  {}\n";
  text += "\n" + fmt::format(kRow, "extents of", "offset", "bytes", "what");
  std::array<std::int64_t, kNumRoles> counts{};
  std::array<std::int64_t, kNumRoles> sums{};
  const auto end_role = [&](std::size_t role) {
    if (counts[role] > kShownPerRole) {
      text +=
          fmt::format(kRow, "", "", "", fmt::format("and {} more", counts[role] - kShownPerRole));
    }
    text += fmt::format(kRow, to_string(static_cast<Role>(role)), "all",
                        approximate_bytes(sums[role]), fmt::format("{} extents", counts[role]));
  };
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const PlannedExtent& extent = extents[i];
    const auto role = static_cast<std::size_t>(extent.role);
    sums[role] += extent.bytes;
    if (++counts[role] <= kShownPerRole) {
      text += fmt::format(kRow, to_string(extent.role), extent.offset, extent.bytes,
                          what_text(memory, extent));
    }
    if (i + 1 == extents.size() || extents[i + 1].role != extent.role) {
      end_role(role);
    }
  }
  return text;
}

Json tiers_json(const TrainMemory& memory) {
  const planner::MemoryPlan& plan = memory.plan;
  Json lines = Json::array();
  for (const planner::LedgerLine& line : plan.ledger_with_groups()) {
    lines.push_back(
        {{"tier", to_string(line.tier)}, {"role", to_string(line.role)}, {"bytes", line.bytes}});
  }
  Json places = Json::array();
  for (std::size_t i = 0; i < plan.params.size(); ++i) {
    places.push_back({{"name", memory.shapes.params[i].name},
                      {"parameter", to_string(plan.params[i].parameter)},
                      {"gradient", to_string(plan.params[i].gradient)},
                      {"states", to_string(plan.params[i].states)},
                      {"secondary", to_string(plan.params[i].secondary)}});
  }
  Json extents = Json::array();
  for (const PlannedExtent& extent : extents_of(memory)) {
    extents.push_back({{"role", to_string(extent.role)},
                       {"param", name_of(memory, extent.param)},
                       {"tensor", extent.tensor},
                       {"begin", extent.begin},
                       {"offset", extent.offset},
                       {"bytes", extent.bytes}});
  }
  const planner::StepBytes& step = plan.step;
  return {{"bytes", lines},
          {"secondary_bytes",
           {{"device", plan.secondary_device_bytes}, {"host", plan.secondary_host_bytes}}},
          {"full_gradient_bytes", plan.full_gradient_bytes},
          {"activation_bytes", memory.activations.peak},
          {"head_activation_bytes", memory.activations.head},
          {"device_peak_bytes", memory.device_peak_bytes},
          {"network_bytes", plan.comm_bytes + plan.chunk_bytes},
          {"step",
           {{"states_read_bytes", step.states_read},
            {"states_written_bytes", step.states_written},
            {"parameters_read_bytes", step.parameters_read},
            {"parameters_written_bytes", step.parameters_written},
            {"gradients_read_bytes", step.gradients_read},
            {"gradients_written_bytes", step.gradients_written}}},
          {"link", {{"up_bytes", plan.link.h2d}, {"down_bytes", plan.link.d2h}}},
          {"update",
           {{"resident_numel", plan.update.resident},
            {"streamed_numel", plan.update.streamed},
            {"processor_numel", plan.update.cpu}}},
          {"sub_group_numel", plan.sub_group_numel},
          {"optimizer_buffers", plan.num_optimizer_buffers},
          {"places", places},
          {"extents", extents}};
}

}  // namespace tessera::cli
