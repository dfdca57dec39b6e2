#include "tessera/optim/update_loops.h"

#include <array>
#include <cstddef>
#include <type_traits>

#include "tessera/optim/kernels.h"

namespace tessera::optim {
namespace {

// Everything below is inlined into one function per instruction set, and compiled for it.
#define TESSERA_INLINE [[gnu::always_inline]] inline

struct NoParameter {};

TESSERA_INLINE float widened(float value) { return value; }
template <typename Half>
TESSERA_INLINE float widened(Half value) {
  return to_float(value);
}

TESSERA_INLINE void narrow(float value, BFloat16& out) { out = to_bfloat16(value); }
TESSERA_INLINE void narrow(float value, Float16& out) { out = to_float16(value); }

template <typename Rule, typename Gradient, typename Parameter>
TESSERA_INLINE void update_elements(const ElementScalars& given, const UpdateSpan& span,
                                    std::int64_t begin, std::int64_t end) {
  // Copies, so that the compiler need not fear that a store changes them.
  const ElementScalars scalars = given;
  float* __restrict master = span.master;
  const Gradient* __restrict gradient = static_cast<const Gradient*>(span.gradient);
  float* __restrict first_state = span.states[0];
  float* __restrict second_state = span.states[1];
  Parameter* __restrict parameter = static_cast<Parameter*>(span.parameter);
  for (std::int64_t i = begin; i < end; ++i) {
    float weight = master[i];
    float first = 0;
    float second = 0;
    if constexpr (Rule::kNumStates > 0) {
      first = first_state[i];
    }
    if constexpr (Rule::kNumStates > 1) {
      second = second_state[i];
    }
    Rule::update(scalars, widened(gradient[i]) * scalars.gradient_scale, weight, first, second);
    master[i] = weight;
    if constexpr (Rule::kNumStates > 0) {
      first_state[i] = first;
    }
    if constexpr (Rule::kNumStates > 1) {
      second_state[i] = second;
    }
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      narrow(weight, parameter[i]);
    }
  }
}

template <typename Rule, typename Gradient>
TESSERA_INLINE void update_parameter(const ElementScalars& scalars, const UpdateSpan& span,
                                     std::int64_t begin, std::int64_t end) {
  if (span.parameter == nullptr) {
    update_elements<Rule, Gradient, NoParameter>(scalars, span, begin, end);
  } else if (span.parameter_dtype == DType::kBFloat16) {
    update_elements<Rule, Gradient, BFloat16>(scalars, span, begin, end);
  } else {
    update_elements<Rule, Gradient, Float16>(scalars, span, begin, end);
  }
}

template <typename Rule>
TESSERA_INLINE void update_by(const ElementScalars& scalars, const UpdateSpan& span,
                              std::int64_t begin, std::int64_t end) {
  if (span.gradient_dtype == DType::kFloat32) {
    update_parameter<Rule, float>(scalars, span, begin, end);
  } else {
    update_parameter<Rule, BFloat16>(scalars, span, begin, end);
  }
}

TESSERA_INLINE void update_any(ElementRule rule, const ElementScalars& scalars,
                               const UpdateSpan& span, std::int64_t begin, std::int64_t end) {
  switch (rule) {
    case ElementRule::kAdamW:
      return update_by<AdamWElement>(scalars, span, begin, end);
    case ElementRule::kAdam:
      return update_by<AdamElement>(scalars, span, begin, end);
    case ElementRule::kSgd:
      return update_by<SgdElement>(scalars, span, begin, end);
    case ElementRule::kMomentum:
      return update_by<MomentumElement>(scalars, span, begin, end);
    case ElementRule::kLion:
      return update_by<LionElement>(scalars, span, begin, end);
  }
}

TESSERA_INLINE double block_sum(const float* values, std::int64_t numel) {
  double lanes[kNormLanes] = {};
  std::int64_t begin = 0;
  for (; begin + kNormLanes <= numel; begin += kNormLanes) {
    for (int lane = 0; lane < kNormLanes; ++lane) {
      const double value = values[begin + lane];
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; begin + lane < numel; ++lane) {
    const double value = values[begin + lane];
    lanes[lane] += value * value;
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

TESSERA_INLINE void add_elements(float* __restrict values, const float* __restrict addend,
                                 std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    values[i] += addend[i];
  }
}

template <typename Half>
TESSERA_INLINE void widen_elements(float* __restrict to, const Half* __restrict from,
                                   std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = to_float(from[i]);
  }
}

TESSERA_INLINE void widen_any(float* to, const void* from, DType dtype, std::int64_t numel) {
  if (dtype == DType::kBFloat16) {
    widen_elements(to, static_cast<const BFloat16*>(from), numel);
  } else {
    widen_elements(to, static_cast<const Float16*>(from), numel);
  }
}

// The four loops for one instruction set. A macro, since an attribute cannot be a template
// argument.
#define TESSERA_LOOPS(suffix, attribute)                                                         \
  attribute void update_##suffix(ElementRule rule, const ElementScalars& scalars,                \
                                 const UpdateSpan& span, std::int64_t begin, std::int64_t end) { \
    update_any(rule, scalars, span, begin, end);                                                 \
  }                                                                                              \
  attribute double block_sum_##suffix(const float* values, std::int64_t numel) {                 \
    return block_sum(values, numel);                                                             \
  }                                                                                              \
  attribute void add_##suffix(float* values, const float* addend, std::int64_t numel) {          \
    add_elements(values, addend, numel);                                                         \
  }                                                                                              \
  attribute void widen_##suffix(float* to, const void* from, DType dtype, std::int64_t numel) {  \
    widen_any(to, from, dtype, numel);                                                           \
  }                                                                                              \
  constexpr Loops loops_##suffix(std::string_view name) {                                        \
    return {name, update_##suffix, block_sum_##suffix, add_##suffix, widen_##suffix};            \
  }

TESSERA_LOOPS(baseline, )
#if defined(__x86_64__)
TESSERA_LOOPS(v3, __attribute__((target("arch=x86-64-v3"))))
TESSERA_LOOPS(v4, __attribute__((target("arch=x86-64-v4"))))
constexpr std::array kLoops = {loops_baseline("baseline"), loops_v3("x86-64-v3"),
                               loops_v4("x86-64-v4")};
#else
constexpr std::array kLoops = {loops_baseline("baseline")};
#endif

std::size_t count_runnable() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("x86-64-v3")) {
    return 1;
  }
  return __builtin_cpu_supports("x86-64-v4") ? 3 : 2;
#else
  return 1;
#endif
}

}  // namespace

std::span<const Loops> runnable_loops() {
  static const std::size_t num_runnable = count_runnable();
  return std::span<const Loops>(kLoops).first(num_runnable);
}

}  // namespace tessera::optim
