#include "tessera/optim/rule.h"

#include <cmath>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/optim/content_hash.cuh"
#include "tessera/optim/step_rules.cuh"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {
namespace {

constexpr std::array<std::string_view, 2> kAdamStates = {"exp_avg", "exp_avg_sq"};
constexpr std::array<std::string_view, 1> kMomentumState = {"momentum"};
constexpr std::array<std::string_view, 1> kLionState = {"exp_avg"};

RuleKind parse_kind(std::string_view text) {
  for (const RuleKind kind : {RuleKind::kAdamW, RuleKind::kAdam, RuleKind::kSgd, RuleKind::kLion}) {
    if (to_string(kind) == text) {
      return kind;
    }
  }
  throw InternalError(detail::concat("optim.kind = ", text, " has no update rule"));
}

}  // namespace

std::string_view to_string(RuleKind kind) {
  switch (kind) {
    case RuleKind::kAdamW:
      return "adamw";
    case RuleKind::kAdam:
      return "adam";
    case RuleKind::kSgd:
      return "sgd";
    case RuleKind::kLion:
      return "lion";
  }
  return "?";
}

RuleOptions RuleOptions::from(const Config& config) {
  RuleOptions rule;
  rule.kind = parse_kind(config.get_string("optim.kind"));
  rule.beta1 = config.get_double("optim.beta1");
  rule.beta2 = config.get_double("optim.beta2");
  rule.eps = config.get_double("optim.eps");
  rule.weight_decay = config.get_double("optim.weight_decay");
  rule.momentum = config.get_double("optim.momentum");
  const bool has_bias_correction = rule.kind == RuleKind::kAdamW || rule.kind == RuleKind::kAdam;
  TESSERA_CHECK(!has_bias_correction || (rule.beta1 < 1 && rule.beta2 < 1), ConfigError,
                "optim.kind = ", to_string(rule.kind), " with optim.beta1 = ", rule.beta1,
                " and optim.beta2 = ", rule.beta2,
                ": the bias correction would divide by zero; both must be below 1");
  return rule;
}

ElementRule element_rule(const RuleOptions& rule) {
  switch (rule.kind) {
    case RuleKind::kAdamW:
      return ElementRule::kAdamW;
    case RuleKind::kAdam:
      return ElementRule::kAdam;
    case RuleKind::kSgd:
      return rule.momentum == 0 ? ElementRule::kSgd : ElementRule::kMomentum;
    case RuleKind::kLion:
      return ElementRule::kLion;
  }
  throw InternalError("an update rule without an arithmetic");
}

std::span<const std::string_view> state_names(const RuleOptions& rule) {
  switch (element_rule(rule)) {
    case ElementRule::kAdamW:
    case ElementRule::kAdam:
      return kAdamStates;
    case ElementRule::kMomentum:
      return kMomentumState;
    case ElementRule::kLion:
      return kLionState;
    case ElementRule::kSgd:
      break;
  }
  return {};
}

std::string list_states(const RuleOptions& rule) {
  std::string list = "master";
  for (const std::string_view name : state_names(rule)) {
    list += detail::concat(", ", name);
  }
  return list;
}

ElementScalars element_scalars(const RuleOptions& rule, const UpdateScalars& scalars) {
  const double weight_decay = rule.weight_decay * scalars.weight_decay_scale;
  const auto step = static_cast<double>(scalars.step);
  ElementScalars out;
  out.gradient_scale = static_cast<float>(scalars.gradient_scale);
  out.beta1 = static_cast<float>(rule.beta1);
  out.beta1_rest = static_cast<float>(1 - rule.beta1);
  out.beta2 = static_cast<float>(rule.beta2);
  out.beta2_rest = static_cast<float>(1 - rule.beta2);
  out.eps = static_cast<float>(rule.eps);
  out.weight_decay = static_cast<float>(weight_decay);
  out.weight_factor = static_cast<float>(1 - scalars.lr * weight_decay);
  out.step_size = static_cast<float>(-scalars.lr);
  switch (rule.kind) {
    case RuleKind::kAdamW:
    case RuleKind::kAdam:
      out.step_size = static_cast<float>(-(scalars.lr / (1 - std::pow(rule.beta1, step))));
      out.root_correction = static_cast<float>(std::sqrt(1 - std::pow(rule.beta2, step)));
      break;
    case RuleKind::kSgd:
      // See MomentumElement.
      out.beta1 = scalars.step == 1 ? -0.0F : static_cast<float>(rule.momentum);
      break;
    case RuleKind::kLion:
      break;
  }
  return out;
}

bool take_factor(const StepOnDevice* step, ElementScalars& scalars) {
  if (step == nullptr) {
    return true;
  }
  scalars.gradient_scale = element_factor(*step);
  return step->skips == 0;
}

void check_element_type(const char* work, DType dtype) {
  TESSERA_INVARIANT(
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, work,
      " of type ", to_string(dtype), "; fp32, bf16 and fp16 are known");
}

void check_hashed(const void* data) {
  TESSERA_INVARIANT(reinterpret_cast<std::uintptr_t>(data) % kHashWordBytes == 0,
                    "hash of memory that is not aligned to its words");
}

void check_update(const RuleOptions& rule, const UpdateScalars& scalars, const UpdateSpan& span) {
  TESSERA_INVARIANT(scalars.step >= 1, "update of step ", scalars.step, "; steps count from 1");
  TESSERA_INVARIANT(span.numel >= 0, "update of ", span.numel, " elements");
  check_element_type("update with a gradient", span.gradient_dtype);
  TESSERA_INVARIANT(span.parameter == nullptr || span.parameter_dtype == DType::kBFloat16 ||
                        span.parameter_dtype == DType::kFloat16,
                    "update that writes ", to_string(span.parameter_dtype),
                    "; bf16 and fp16 are known, fp32 is the master itself");
  if (span.numel == 0) {
    return;
  }
  TESSERA_INVARIANT(span.master != nullptr && span.gradient != nullptr,
                    "update without weights or without a gradient");
  const auto names = state_names(rule);
  for (std::size_t i = 0; i < names.size(); ++i) {
    TESSERA_INVARIANT(span.states[i] != nullptr, "update by ", to_string(rule.kind),
                      " without its state ", names[i]);
  }
}

void update(const RuleOptions& rule, const UpdateScalars& scalars, const UpdateSpan& span) {
  check_update(rule, scalars, span);
  ElementScalars rounded = element_scalars(rule, scalars);
  if (take_factor(scalars.on_device, rounded)) {
    best_loops().update(element_rule(rule), rounded, span, 0, span.numel);
  }
}

}  // namespace tessera::optim
