#include "cli/inspect_mesh.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "cli/flag_values.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;
using planner::MeshChoice;

bool is_plain(const MeshChoice& choice) {
  return choice.mesh.num_replicas() == 1 && !choice.mesh.hierarchical() &&
         choice.modes.secondary_size == 1 && choice.modes.is_exact();
}

bool is_own(const MeshChoice& choice, const MeshComparison& comparison) {
  return choice.mesh == comparison.own.mesh && choice.modes == comparison.own.modes;
}

// --- the screen ---

std::string time_text(double time_s) {
  return time_s < 1 ? fmt::format("{:.3g} ms", time_s * 1e3) : fmt::format("{:.2f} s", time_s);
}

std::string rate_text(double bytes_per_s) { return fmt::format("{:.4g} GB/s", bytes_per_s * 1e-9); }

std::string flags_text(const MeshChoice& choice) {
  const planner::TrafficModes& modes = choice.modes;
  std::string text;
  const auto add = [&](const std::string& flag) { text += (text.empty() ? "" : " ") + flag; };
  if (choice.mesh.num_replicas() > 1) {
    add(fmt::format("--shard-size {}", choice.mesh.shard_size()));
  }
  if (choice.mesh.hierarchical()) {
    add("--hierarchical");
  }
  if (modes.secondary_size > 1) {
    add(fmt::format("--hpz-size {}", modes.secondary_size));
  }
  if (modes.weight_bits > 0) {
    add("--quantize-weights");
  }
  if (modes.encodes_gradients()) {
    add(fmt::format("--quantize-gradients={}", modes.gradient_bits_across));
  }
  return text.empty() ? "plain ZeRO-3" : text;
}

std::string trimmed(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string own_bytes_text(const MeshChoice& own) {
  constexpr const char* kRow = "  {:<22}{:>14}{:>14}{:>18}";
  std::string text =
      trimmed(fmt::format(kRow, "per step", "rank, inside", "rank, across", "host, across"));
  const auto add = [&](const char* what, const comm::SentBytes& sent) {
    text += trimmed(fmt::format(kRow, what, approximate_bytes(sent.inside),
                                approximate_bytes(sent.across),
                                approximate_bytes(sent.across * own.mesh.ranks_per_host())));
  };
  add("gathers", own.bytes.gathers);
  if (own.modes.secondary_size > 1) {
    add("secondary gathers", own.bytes.secondary_gathers);
  }
  add("reduce-scatters", own.bytes.reduce_scatters);
  add("sums over copies", own.bytes.replica_sums);
  add("all", own.bytes.rank());
  if (own.secondary_bytes + own.encoded_bytes > 0) {
    text +=
        fmt::format("memory of a rank: secondary shards {}, encoded shards {}\n",
                    approximate_bytes(own.secondary_bytes), approximate_bytes(own.encoded_bytes));
  }
  return text;
}

constexpr const char* kChoiceRow = "  {:>7}{:>9}{:>8}{:>14}{:>16}{:>16}{:>12}  {}";

std::string choice_text(const MeshChoice& choice, const MeshComparison& comparison, bool is_best) {
  const comm::Mesh& mesh = choice.mesh;
  std::string notes;
  const auto note = [&](const std::string& words) { notes += (notes.empty() ? "" : ", ") + words; };
  const planner::TrafficModes& modes = choice.modes;
  if (mesh.hierarchical()) {
    note("hierarchical");
  }
  if (modes.secondary_size > 1) {
    note(fmt::format("hpZ {}", modes.secondary_size));
  }
  if (modes.weight_bits > 0) {
    note(fmt::format("qwZ int{}", modes.weight_bits));
  }
  if (modes.encodes_gradients()) {
    note(fmt::format("qgZ int{}", modes.gradient_bits_across));
  }
  if (is_plain(choice)) {
    note("plain ZeRO-3");
  }
  if (is_own(choice, comparison)) {
    note("this");
  }
  if (!choice.fits) {
    note("does not fit");
  }
  if (is_best) {
    note("recommended");
  }
  return trimmed(fmt::format(
      kChoiceRow, mesh.shard_size(), mesh.num_replicas(), mesh.hosts_per_group(),
      approximate_bytes(choice.memory_bytes), approximate_bytes(choice.bytes.rank().inside),
      approximate_bytes(choice.bytes.host_across(mesh)),
      comparison.rates ? time_text(communication_s(choice, *comparison.rates)) : "-", notes));
}

// No less memory and no fewer bytes on either link than another one that fits and is as exact: of
// equal ones the first counts.
bool is_beaten(std::size_t i, const std::vector<MeshChoice>& choices) {
  const auto cost = [](const MeshChoice& of) {
    return std::array{of.memory_bytes, of.bytes.rank().inside, of.bytes.host_across(of.mesh)};
  };
  const std::array own = cost(choices[i]);
  for (std::size_t j = 0; j < choices.size(); ++j) {
    const bool counts =
        j != i && choices[j].fits && choices[j].modes.is_exact() == choices[i].modes.is_exact();
    const std::array other = counts ? cost(choices[j]) : own;
    if (counts && std::equal(other.begin(), other.end(), own.begin(), std::less_equal<>()) &&
        (other != own || j < i)) {
      return true;
    }
  }
  return false;
}

// All meshes, and of what else they can be asked for what is worth it.
std::string choices_text(const MeshComparison& comparison, bool are_exact) {
  std::string text = trimmed(fmt::format(kChoiceRow, "shards", "copies", "hosts", "memory",
                                         "inside", "across", "time", ""));
  std::int64_t num_too_large = 0;
  std::int64_t num_beaten = 0;
  for (std::size_t i = 0; i < comparison.choices.size(); ++i) {
    const MeshChoice& choice = comparison.choices[i];
    if (choice.modes.is_exact() != are_exact) {
      continue;
    }
    const bool is_told = is_plain(choice) || is_own(choice, comparison) || comparison.best == i ||
                         comparison.best_inexact == i;
    const bool is_mesh_alone = are_exact && choice.modes.secondary_size == 1;
    if (!is_told && !choice.fits) {
      ++num_too_large;
    } else if (!is_told && !is_mesh_alone && is_beaten(i, comparison.choices)) {
      ++num_beaten;
    } else {
      text += choice_text(choice, comparison, comparison.best == i);
    }
  }
  if (num_beaten > 0) {
    text += fmt::format(
        "  {} more take no less memory, and send no less on either link, than one of these (--json "
        "has them)\n",
        num_beaten);
  }
  if (num_too_large > 0) {
    text += fmt::format("  {} more do not fit into the device budget\n", num_too_large);
  }
  return text;
}

std::string footnote(const MeshComparison& comparison) {
  std::string text =
      "memory: of a rank with everything in it but activations. inside: bytes that a rank sends to "
      "its host\nper step; across: bytes that a host sends to the others. hpZ N: secondary shards "
      "over N ranks of a host;\nqwZ, qgZ: gathers, reductions of blocks of integers.\n";
  if (!comparison.rates) {
    return text + "--link-inside RATE and --link-across RATE add times and a recommendation.\n";
  }
  const planner::LinkRates& rates = *comparison.rates;
  text += fmt::format(
      "time: of the bytes alone; the sum over gathers, reductions and sums over copies of\n"
      "max(inside / {} of a rank",
      rate_text(rates.inside));
  text += rates.across > 0 ? fmt::format(", across / {} of a host)", rate_text(rates.across)) : ")";
  text += "; of two phases or hops both added.\n";
  if (!comparison.best) {
    return text + "no mesh fits into the device budget\n";
  }
  const MeshChoice& best = comparison.choices[*comparison.best];
  text += "recommended: " + flags_text(best) + "\n";
  if (comparison.best_inexact) {
    const MeshChoice& inexact = comparison.choices[*comparison.best_inexact];
    text += fmt::format("if numbers may change, in {:.2f} of its time: {}\n",
                        communication_s(inexact, rates) / communication_s(best, rates),
                        flags_text(inexact));
  }
  return text;
}

// --- JSON ---

Json sent_json(const comm::SentBytes& sent) {
  return {{"inside_bytes", sent.inside}, {"across_bytes", sent.across}};
}

Json choice_json(const MeshChoice& choice, const std::optional<planner::LinkRates>& rates) {
  const comm::Mesh& mesh = choice.mesh;
  Json json{{"shard_size", mesh.shard_size()},
            {"hierarchical", mesh.hierarchical()},
            {"secondary_size", choice.modes.secondary_size},
            {"weight_bits", choice.modes.weight_bits},
            {"gradient_bits_inside", choice.modes.gradient_bits_inside},
            {"gradient_bits_across", choice.modes.gradient_bits_across},
            {"exact", choice.modes.is_exact()},
            {"num_replicas", mesh.num_replicas()},
            {"hosts_per_group", mesh.hosts_per_group()},
            {"memory_bytes", choice.memory_bytes},
            {"secondary_bytes", choice.secondary_bytes},
            {"encoded_bytes", choice.encoded_bytes},
            {"fits", choice.fits},
            {"inside_bytes", choice.bytes.rank().inside},
            {"across_bytes", choice.bytes.rank().across},
            {"host_across_bytes", choice.bytes.host_across(mesh)}};
  if (rates) {
    json["time_s"] = communication_s(choice, *rates);
  }
  return json;
}

}  // namespace

std::optional<planner::LinkRates> parse_link_rates(const std::string& inside,
                                                   const std::string& across,
                                                   const comm::Mesh& mesh) {
  if (inside.empty() && across.empty()) {
    return std::nullopt;
  }
  TESSERA_CHECK(mesh.num_hosts() > 1 || across.empty(), ConfigError, "--link-across: all ",
                mesh.num_ranks(), " ranks are on one host; leave it out, or give --ranks-per-host");
  const bool needs_inside = mesh.ranks_per_host() > 1;
  TESSERA_CHECK(!inside.empty() || !needs_inside, ConfigError,
                "--link-across without --link-inside; give the rates of both links");
  TESSERA_CHECK(!across.empty() || mesh.num_hosts() == 1, ConfigError,
                "--link-inside without --link-across; give the rates of both links");
  planner::LinkRates rates;
  rates.inside = inside.empty() ? 0 : parse_rate("--link-inside", inside);
  rates.across = across.empty() ? 0 : parse_rate("--link-across", across);
  return rates;
}

MeshComparison compare_meshes(const StepPlanInput& input, const StepPlan& plan,
                              const std::optional<planner::LinkRates>& rates) {
  planner::MeshQuestion question;
  question.world.num_ranks = input.mesh.num_ranks();
  question.world.ranks_per_host = input.mesh.ranks_per_host();
  question.num_micro_batches = input.num_micro_batches;
  question.num_gathers = plan.num_gathers;
  question.block_numel = input.modes.block_numel;
  if (input.mesh.shard_size() == 1 && input.mesh.num_ranks() > 1) {
    // A whole copy gathers nothing. The others do what plain ZeRO-3 does.
    StepPlanInput plain = input;
    plain.mesh = comm::plan_mesh(question.world);
    plain.memory.reset();
    question.num_gathers = plan_step(plain).num_gathers;
  }
  MeshComparison comparison;
  comparison.own =
      mesh_choice(input.mesh, input.modes, input.shapes, input.memory_options, question);
  comparison.choices = mesh_choices(input.shapes, input.memory_options, question);
  const bool has_own =
      std::any_of(comparison.choices.begin(), comparison.choices.end(),
                  [&](const MeshChoice& each) { return is_own(each, comparison); });
  if (!has_own) {  // it changes nothing: hpZ on one host
    comparison.choices.push_back(comparison.own);
  }
  comparison.rates = rates;
  if (rates) {
    comparison.best = best_mesh(comparison.choices, *rates, planner::Exactness::kExact);
    comparison.best_inexact = best_mesh(comparison.choices, *rates, planner::Exactness::kAny);
    if (comparison.best_inexact && comparison.choices[*comparison.best_inexact].modes.is_exact()) {
      comparison.best_inexact.reset();
    }
  }
  return comparison;
}

std::string mesh_screen(const MeshComparison& comparison) {
  const comm::Mesh& mesh = comparison.own.mesh;
  if (mesh.num_ranks() == 1) {
    return "";
  }
  return mesh.describe() + "\n" + own_bytes_text(comparison.own) + "\n" +
         fmt::format("What {} ranks can do without changing a number:\n", mesh.num_ranks()) +
         choices_text(comparison, true) + "\nWhat changes numbers, and is off by default:\n" +
         choices_text(comparison, false) + footnote(comparison);
}

Json mesh_json(const MeshComparison& comparison) {
  const MeshChoice& own = comparison.own;
  const comm::Mesh& mesh = own.mesh;
  Json choices = Json::array();
  for (const MeshChoice& each : comparison.choices) {
    choices.push_back(choice_json(each, comparison.rates));
  }
  Json json{{"num_ranks", mesh.num_ranks()},
            {"ranks_per_host", mesh.ranks_per_host()},
            {"shard_size", mesh.shard_size()},
            {"num_replicas", mesh.num_replicas()},
            {"hierarchical", mesh.hierarchical()},
            {"own", choice_json(own, comparison.rates)},
            {"step",
             {{"gathers", sent_json(own.bytes.gathers)},
              {"secondary_gathers", sent_json(own.bytes.secondary_gathers)},
              {"reduce_scatters", sent_json(own.bytes.reduce_scatters)},
              {"replica_sums", sent_json(own.bytes.replica_sums)}}},
            {"choices", std::move(choices)}};
  if (comparison.rates) {
    json["links"] = {{"inside_bytes_per_s", comparison.rates->inside},
                     {"across_bytes_per_s", comparison.rates->across}};
    const auto recommended = [&](const std::optional<std::size_t>& choice) {
      return choice ? choice_json(comparison.choices[*choice], comparison.rates) : Json(nullptr);
    };
    json["recommended"] = recommended(comparison.best);
    json["recommended_if_numbers_may_change"] = recommended(comparison.best_inexact);
  }
  return json;
}

}  // namespace tessera::cli
