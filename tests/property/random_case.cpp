#include "tests/property/random_case.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tests/property/draw.h"

namespace tessera::testing {
namespace {

constexpr std::uint64_t kCaseStream = 1001;
constexpr std::uint64_t kBatchStream = 1002;
constexpr std::uint64_t kPlaceStream = 1003;  // what was drawn before stays as it is

std::uint64_t number_of(const Moment& moment, int rank) {
  return static_cast<std::uint64_t>(
      ((moment.step * 8 + moment.micro_batch + 1) * 8 + moment.forward) * 8 + rank);
}

int draw_divisor(int number, int above, int below, Draw& draw) {
  std::vector<int> divisors;
  for (int each = above + 1; each < below; ++each) {
    if (number % each == 0) {
      divisors.push_back(each);
    }
  }
  return divisors[draw.below(divisors.size())];
}

bool has_option(const CasePlan& plan, const std::string& name) {
  return std::any_of(plan.options.begin(), plan.options.end(),
                     [&](const auto& option) { return option.first == name; });
}

void set_option(CasePlan& plan, const std::string& name, std::string value) {
  std::erase_if(plan.options, [&](const auto& option) { return option.first == name; });
  plan.options.emplace_back(name, std::move(value));
}

void draw_mesh(CasePlan& plan, Draw& draw) {
  plan.shard_size = plan.ranks;
  if (plan.ranks == 1) {
    return;
  }
  if (draw.chance(40)) {
    if (draw.chance(50)) {
      plan.options.emplace_back("shard.secondary_group_size",
                                std::to_string(draw_divisor(plan.ranks, 1, plan.ranks + 1, draw)));
    }
    return;
  }
  plan.shard_size = draw_divisor(plan.ranks, 0, plan.ranks + 1, draw);
  plan.options.emplace_back("shard.group_size", std::to_string(plan.shard_size));
  if (plan.shard_size > 1 && draw.chance(50)) {
    plan.options.emplace_back(
        "comm.ranks_per_host",
        std::to_string(draw_divisor(plan.shard_size, 0, plan.shard_size, draw)));
    plan.options.emplace_back("shard.hierarchical_gather", "true");
  }
  // Where dynamic parameters are added behind that, the order is another.
  const int last = plan.model.has_dynamic() ? 0 : draw.between(-1, 1);
  plan.accumulate = std::max(1, plan.micro_batches + last);
  plan.options.emplace_back("batch.accumulate", std::to_string(plan.accumulate));
  plan.options.emplace_back("mics.check_replicas", "true");
}

// Of several copies it is drawn with the mesh.
void draw_accumulation(CasePlan& plan, Draw& draw) {
  if (plan.shard_size < plan.ranks) {
    return;
  }
  if (plan.micro_batches == 1 && !plan.evaluates_between && draw.chance(40)) {
    plan.micro_batches = draw.between(2, 3);
  }
  plan.accumulate = draw.chance(70) ? plan.micro_batches : draw.between(1, 3);
  set_option(plan, "batch.accumulate", std::to_string(plan.accumulate));
}

// Nothing that fp32 or a tier forbids, see Planner::check_tiers().
void draw_placement(CasePlan& plan, Draw& draw) {
  plan.is_discrete = draw.chance(50);
  if (!plan.is_discrete && draw.chance(70)) {
    return;  // nothing is planned
  }
  // Groups that share a stream may be given it in another order on each rank: those of dynamic
  // units, of secondary shards and of phases. Such calls are not drawn as work of streams.
  const bool shares_streams = plan.model.has_dynamic() ||
                              has_option(plan, "shard.secondary_group_size") ||
                              has_option(plan, "shard.hierarchical_gather");
  plan.calls_on_streams = plan.is_discrete && plan.ranks > 1 && draw.chance(50) && !shares_streams;
  if (plan.is_discrete && draw.chance(10)) {
    return;
  }
  std::string parameters = draw.one_of<const char*>({"device", "host", "host", "nvme"});
  const std::string optimizer = draw.one_of<const char*>({"device", "host", "host", "nvme"});
  if (plan.is_discrete && optimizer == "device" && parameters != "device") {
    parameters = plan.precision.empty() ? "device" : "host";
  }
  set_option(plan, "place.parameters", parameters);
  set_option(plan, "place.optimizer", optimizer);
  plan.uses_nvme = parameters == "nvme" || optimizer == "nvme";
  if (plan.uses_nvme && draw.chance(30)) {
    set_option(plan, "place.parameters_host_bytes", draw.one_of<const char*>({"64", "300"}));
  }
  if (draw.chance(75)) {
    set_option(plan, "optim.cpu_share", draw.one_of<const char*>({"0", "0.5", "1"}));
  }
  if (plan.is_discrete) {  // else all parameters of such models are small
    set_option(plan, "persist.param_bytes", draw.one_of<const char*>({"0", "16", "64"}));
    // What is planned while it is frozen may have no slot for its update, and is refused then.
    std::erase_if(plan.freezes, [&](const FreezePlan& freeze) {
      return freeze.step == 0 ||
             !plan.model.params[static_cast<std::size_t>(freeze.param)].trainable;
    });
  }
}

}  // namespace

CasePlan draw_case(std::uint64_t seed) {
  CasePlan plan;
  plan.seed = seed;
  plan.model = draw_model(seed);
  Draw draw(seed, kCaseStream);
  plan.ranks = draw.between(1, 5);
  plan.steps = draw.between(2, 4);
  plan.micro_batches = draw.chance(40) ? draw.between(2, 3) : 1;
  plan.forwards = draw.chance(25) && !plan.model.is_chain && !plan.model.has_dynamic() ? 2 : 1;
  for (int step = 0; step < plan.steps; ++step) {
    plan.evaluates_before_step.push_back(draw.chance(25));
  }
  plan.evaluates_before_update = draw.chance(15);
  plan.asks_for_input_gradients = draw.chance(15);
  const auto num_params = static_cast<int>(plan.model.params.size());
  for (int step = 0; step < plan.steps; ++step) {
    while (draw.chance(20)) {
      plan.edits.push_back(
          {step, draw.between(0, num_params - 1), draw.between(0, plan.ranks - 1)});
    }
    // The last parameter is the head's: without it there might be no gradient.
    while (num_params > 1 && draw.chance(15)) {
      plan.freezes.push_back({step, draw.between(0, num_params - 2), draw.chance(50)});
    }
  }
  // Ranks that run different units would be interrupted at different places.
  if (draw.chance(25) && !plan.model.has_dynamic()) {
    plan.interrupted_step = draw.between(0, plan.steps - 1);
    plan.interrupter.runs_left = draw.between(1, 12);
    plan.interrupter.in_backward = draw.chance(50);
  }
  plan.rule = draw.one_of<const char*>({"sgd", "momentum", "adamw"});
  plan.precision = !plan.model.autocast && draw.chance(20) ? "bf16" : "";
  plan.evaluates_between = plan.micro_batches > 1 && draw.chance(30);
  plan.runs_twice = draw.chance(10);
  plan.tries_old_graphs = !plan.model.has_dynamic() && draw.chance(20);
  const std::pair<const char*, std::vector<const char*>> choices[] = {
      {"prefetch.bucket_bytes", {"0", "1", "100", "400", "4KiB", "128MiB"}},
      {"prefetch.max_inflight", {"1", "2", "4"}},
      {"live.limit_bytes", {"0", "100", "300", "1000", "4KiB", "2GiB", "unlimited"}},
      {"live.reuse_distance_bytes", {"0", "200", "1000", "2GiB"}},
      {"persist.param_bytes", {"0", "16", "64", "256KiB"}},
      {"persist.model_bytes", {"0", "100", "unlimited"}},
      {"grad.bucket_bytes", {"1", "64", "300", "4KiB", "64MiB"}},
  };
  for (const auto& [name, values] : choices) {
    if (draw.chance(85)) {
      plan.options.emplace_back(name, values[draw.below(values.size())]);
    }
  }
  plan.pack_below_bytes = draw.one_of<std::size_t>({0, 20, 64, 64 * 1024});
  draw_mesh(plan, draw);
  Draw places(seed, kPlaceStream);
  draw_accumulation(plan, places);
  draw_placement(plan, places);
  return plan;
}

std::string CasePlan::describe() const {
  std::ostringstream out;
  out << "seed " << seed << ": " << ranks << " ranks, " << steps << " steps, " << micro_batches
      << " micro-batches, " << forwards << " forwards before a backward";
  for (std::size_t step = 0; step < evaluates_before_step.size(); ++step) {
    if (evaluates_before_step[step]) {
      out << ", evaluation before step " << step;
    }
  }
  out << ", " << rule << (precision.empty() ? "" : " in " + precision)
      << (evaluates_between ? ", evaluation between micro-batches" : "")
      << (runs_twice ? ", run twice" : "")
      << (tries_old_graphs ? ", tries graphs from before each step" : "");
  out << (evaluates_before_update ? ", evaluation before every update" : "")
      << (asks_for_input_gradients ? ", gradients of inputs before every step" : "");
  for (const EditPlan& edit : edits) {
    out << ", rank " << edit.rank << " edits "
        << model.params[static_cast<std::size_t>(edit.param)].name << " before step " << edit.step;
  }
  for (const FreezePlan& freeze : freezes) {
    out << ", " << model.params[static_cast<std::size_t>(freeze.param)].name
        << " frozen or unfrozen " << (freeze.by_user ? "by the user " : "") << "before step "
        << freeze.step;
  }
  if (interrupted_step >= 0) {
    out << ", step " << interrupted_step << " interrupted by run " << interrupter.runs_left
        << (interrupter.in_backward ? " in its backward" : "");
  }
  out << (is_discrete ? ", discrete device" : "")
      << (calls_on_streams ? ", calls are work of streams" : "");
  out << "\n  options:";
  for (const auto& [name, value] : options) {
    out << ' ' << name << '=' << value;
  }
  out << " pack_below_bytes=" << pack_below_bytes << '\n' << model.describe();
  return out.str();
}

void edit(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  param.mul_(0.5).add_(0.25);
}

Batch CasePlan::batch(const Moment& moment, int rank) const {
  Draw draw(seed * 131 + kBatchStream, number_of(moment, rank));
  const std::int64_t rows = draw.between(1, 4);
  Batch batch;
  batch.values =
      (at::arange(rows * model.columns, at::kFloat) * 0.61 + static_cast<double>(draw.below(1000)))
          .cos()
          .reshape({rows, model.columns});
  batch.ids = at::empty({rows}, at::kLong);
  for (std::int64_t row = 0; row < rows; ++row) {
    batch.ids.data_ptr<std::int64_t>()[row] = static_cast<std::int64_t>(draw.below(100));
  }
  return batch;
}

double CasePlan::weight(int step, int micro_batch, int rank) const {
  Draw draw(seed * 131 + kBatchStream, number_of({step, micro_batch, 7}, rank));
  if (rank > 0 && draw.chance(10)) {
    return 0;  // a rank without data; rank 0 has some, or there would be no mean
  }
  return 0.25 * draw.between(1, 40);
}

Config CasePlan::config() const {
  Config config;
  config.set("log.level", std::string("error"));
  config.set("seed", static_cast<std::int64_t>(seed));
  config.set("grad.clip_norm", 0.0);
  config.set("optim.kind", std::string(rule == "adamw" ? "adamw" : "sgd"));
  config.set("optim.weight_decay", rule == "sgd" ? 0.0 : 0.25);
  config.set("optim.momentum", rule == "momentum" ? 0.5 : 0.0);
  config.set("optim.lr", kLearningRate);
  if (!precision.empty()) {
    config.set("precision", precision);
  }
  for (const auto& [name, value] : options) {
    config.apply_flag(name + "=" + value);
  }
  std::string dynamic_names;
  for (const UnitPlan& unit : model.units) {
    if (unit.dynamic) {
      dynamic_names += (dynamic_names.empty() ? "" : ",") + unit.name;
    }
  }
  if (!dynamic_names.empty()) {
    config.apply_flag("unit.dynamic_names=" + dynamic_names);
  }
  return config;
}

std::string judge(const CasePlan& plan, Planted planted, const ShardedOptions& options) {
  std::string found;
  try {
    // A plain unit knows the buffers of its own module, and not of units that run inside.
    if (plan.model.has_recompute() && !plan.model.autocast && !plan.model.has_buffers()) {
      found = check_recomputation(plan);
    }
    for (const std::string& line : run_sharded(plan, run_reference(plan, planted), options)) {
      found += "  " + line + "\n";
    }
  } catch (const NotFinite&) {
    return {};
  } catch (const std::exception& error) {
    found += std::string("  the reference fails: ") + error.what() + "\n";
  }
  if (found.empty()) {
    return {};
  }
  return found + plan.describe() + "run it alone: engine_seeds " + std::to_string(plan.seed) + "\n";
}

}  // namespace tessera::testing
