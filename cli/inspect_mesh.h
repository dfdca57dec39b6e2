// What `tessera inspect` says about the mesh: the bytes of a step per link, and the same for every
// other way to cut these ranks into shard groups and to send less across hosts, with memory and,
// where link rates are given, time. What changes numbers is told apart.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/inspect_plan.h"
#include "tessera/planner/mesh_choice.h"

namespace tessera::cli {

// Of the slower directions of the links; the flags as they were typed, empty: not given. Throws
// ConfigError for one that is missing, or that no link is there for. Neither is given: nullopt.
std::optional<planner::LinkRates> parse_link_rates(const std::string& inside,
                                                   const std::string& across,
                                                   const comm::Mesh& mesh);

struct MeshComparison {
  planner::MeshChoice own;  // of the flags
  std::vector<planner::MeshChoice> choices;
  std::optional<planner::LinkRates> rates;
  // Of choices; none: without rates, or where nothing fits.
  std::optional<std::size_t> best;  // of those that change no number
  // Of all, where one that changes numbers takes less time than the best of the others.
  std::optional<std::size_t> best_inexact;
};

MeshComparison compare_meshes(const StepPlanInput& input, const StepPlan& plan,
                              const std::optional<planner::LinkRates>& rates);

// Empty for one rank.
std::string mesh_screen(const MeshComparison& comparison);

nlohmann::ordered_json mesh_json(const MeshComparison& comparison);

}  // namespace tessera::cli
