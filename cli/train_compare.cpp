#include "cli/train_compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

// Norms, projections, attention, activation and residual sums: ten results, forward and back.
constexpr double kRoundingsPerBlock = 20;
constexpr double kFloat32Bound = 2e-6;
constexpr double kMaxMovement = 0.75;

constexpr const char* kCompareRow = "{:<24}{:>12}{:>12}  {}\n";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double relative_difference(double sharded, double unsharded) {
  if (sharded == unsharded || (!std::isfinite(sharded) && !std::isfinite(unsharded))) {
    return 0;
  }
  const double difference = std::abs(sharded - unsharded) / std::abs(unsharded);
  return std::isnan(difference) ? kInfinity : difference;
}

// Differences of several kinds are ranked by how far they are beyond, or below, their bound.
double excess_of(double difference, double bound) {
  if (difference == 0) {
    return 0;
  }
  return bound > 0 ? difference / bound : kInfinity;
}

}  // namespace

Against parse_against(const std::string& word) {
  TESSERA_CHECK(word.empty() || word == "turns" || word == "plain", ConfigError,
                "--verify-against ", tessera::in_quotes(word), ": expected turns or plain");
  return word == "plain" ? Against::kPlain : Against::kTurns;
}

CompareBounds rounding_bounds(DType dtype, std::int64_t layers) {
  if (dtype == DType::kFloat32) {
    return {kFloat32Bound, kFloat32Bound, 0};
  }
  const double roundoff = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double noise = roundoff * std::sqrt(kRoundingsPerBlock * static_cast<double>(layers + 1));
  return {noise, 2 * roundoff, std::min(2 * std::sqrt(noise), kMaxMovement)};
}

void Comparison::add_number(std::string_view what, Worst& worst, std::int64_t step, double sharded,
                            double unsharded) {
  const double difference = relative_difference(sharded, unsharded);
  const double excess = excess_of(difference, bounds_.step);
  if (excess > worst.excess) {
    worst = {excess, difference, bounds_.step, fmt::format("step {}", step)};
  }
  if (excess > 1 && failure_.empty()) {
    failure_ = fmt::format(
        "{} of step {} is {:.17g} sharded and {:.17g} unsharded: {:.3g} apart, "
        "relative, where {:.3g} is allowed",
        what, step, sharded, unsharded, difference, bounds_.step);
    step_failed_ = true;
  }
}

void Comparison::add_loss(std::int64_t step, double sharded, double unsharded) {
  add_number("loss", loss_, step, sharded, unsharded);
}

void Comparison::add_grad_norm(std::int64_t step, double sharded, double unsharded) {
  add_number("grad_norm", grad_norm_, step, sharded, unsharded);
}

void Comparison::add_param(const ParamDifference& param) {
  add_tensor(param, bounds_.norm * param.norm + bounds_.movement * param.movement);
}

void Comparison::add_noise(const ParamDifference& param, double allowed) {
  add_tensor(param, allowed);
}

void Comparison::add_tensor(const ParamDifference& param, double allowed) {
  double excess = excess_of(param.difference, allowed);
  if (std::isnan(excess)) {
    excess = kInfinity;
  }
  if (excess <= param_.excess) {
    return;
  }
  const double scale = param.norm > 0 ? param.norm : 1;
  param_ = {excess, param.difference / scale, allowed / scale, param.name};
  // What goes wrong in a step shows in parameters afterwards: the step is the cause.
  if (excess > 1 && !step_failed_) {
    failure_ = fmt::format(
        "parameter {} differs by {:.3g} in norm from the unsharded one (norm "
        "{:.3g}, moved {:.3g}), where {:.3g} is allowed",
        param.name, param.difference, param.norm, param.movement, allowed);
  }
}

bool Comparison::equal() const {
  return loss_.difference == 0 && grad_norm_.difference == 0 && param_.difference == 0;
}

std::string Comparison::explanation(Against against, int num_ranks, std::string_view precision) {
  const std::string with =
      num_ranks == 1 ? "unsharded training of the same micro-batches"
      : against == Against::kTurns
          ? "unsharded training that takes the ranks' micro-batches in turn (the plain run: "
            "--verify-against plain)"
          : "the plain run in one process, whose micro-batches are those of all ranks together";
  return fmt::format(
      "compared with {}, in {}: loss and gradient norm of every step, relative; every parameter "
      "after the last step, by the norm of its difference over its norm\n",
      with, precision);
}

std::string Comparison::table() const {
  std::string text = fmt::format(kCompareRow, "sharded - unsharded", "worst", "bound", "where");
  const auto add = [&text](const char* what, const Worst& worst) {
    if (worst.excess >= 0) {
      text += fmt::format(kCompareRow, what, fmt::format("{:.3g}", worst.difference),
                          fmt::format("{:.3g}", worst.bound),
                          worst.difference == 0 ? "equal everywhere" : worst.place);
    }
  };
  add("loss", loss_);
  add("grad_norm", grad_norm_);
  add("parameters", param_);
  return text;
}

}  // namespace tessera::cli
