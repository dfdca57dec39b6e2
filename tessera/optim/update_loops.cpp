#include "tessera/optim/update_loops.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tessera/core/vector_loops.h"
#include "tessera/optim/kernels.h"

namespace tessera::optim {
namespace {

using loops::count_runnable_sets;
using loops::fence_stores;
using loops::kHasStreamingStores;
using loops::kLineBytes;
using loops::narrow;
using loops::prefetch;
using loops::store_past_caches;
using loops::widened;

struct NoParameter {};

// The low-precision parameter is written and never read by an update: of large spans it goes past
// the caches (core/vector_loops.h, [Note: streaming stores]), by way of a block. A small span's
// parameter may be wanted from the cache at once.
constexpr std::int64_t kStreamNumel = std::int64_t{2} << 20;
constexpr std::int64_t kStreamBlock = 1024;

template <typename Rule, typename Gradient, typename Parameter>
TESSERA_INLINE void update_run(const ElementScalars& scalars, float* __restrict master,
                               const Gradient* __restrict gradient, float* __restrict first_state,
                               float* __restrict second_state, Parameter* __restrict parameter,
                               std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
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

// Of memory that a rule may be without.
template <typename Value>
TESSERA_INLINE Value* from_element(Value* values, std::int64_t i) {
  return values == nullptr ? nullptr : values + i;
}

constexpr std::int64_t kUpdateStrip = 128;

// How many elements of `parameter` come before the next line, or 0 if no element begins there.
template <typename Parameter>
TESSERA_INLINE std::int64_t numel_before_line(const Parameter* parameter) {
  const std::size_t over = reinterpret_cast<std::uintptr_t>(parameter) % kLineBytes;
  return over == 0 ? 0 : static_cast<std::int64_t>((kLineBytes - over) / sizeof(Parameter));
}

template <typename Rule, typename Gradient, typename Parameter>
TESSERA_INLINE void update_elements(const ElementScalars& given, const UpdateSpan& span,
                                    std::int64_t begin, std::int64_t end) {
  // A copy, so that the compiler need not fear that a store changes it.
  const ElementScalars scalars = given;
  const bool is_streamed = kHasStreamingStores && !std::is_same_v<Parameter, NoParameter> &&
                           span.numel >= kStreamNumel &&
                           reinterpret_cast<std::uintptr_t>(span.parameter) % 2 == 0;
  // The parameter takes the gradient's place: the loop's pointers must not meet.
  const bool is_in_place = span.parameter != nullptr && span.parameter == span.gradient;
  alignas(kLineBytes) Parameter rounded[kStreamBlock];
  for (std::int64_t i = begin; i < end;) {
    Parameter* const parameter = from_element(static_cast<Parameter*>(span.parameter), i);
    std::int64_t numel = end - i;
    bool goes_through_block = false;
    if (is_in_place) {
      numel = std::min(numel, kStreamBlock);
    } else if (is_streamed) {
      // Whole blocks from the first line on; what is before it and behind them is stored as usual.
      const std::int64_t before = numel_before_line(parameter);
      goes_through_block = before == 0 && numel >= kStreamBlock;
      numel = goes_through_block ? kStreamBlock : (before > 0 ? std::min(before, numel) : numel);
    }
    Parameter* const out = goes_through_block || is_in_place ? rounded : parameter;
    float* const master = span.master + i;
    const auto* gradient = static_cast<const Gradient*>(span.gradient) + i;
    float* const first = from_element(span.states[0], i);
    float* const second = from_element(span.states[1], i);
    for (std::int64_t at = 0; at < numel; at += kUpdateStrip) {
      const std::int64_t strip = std::min(kUpdateStrip, numel - at);
      prefetch(master + at, strip);
      prefetch(gradient + at, strip);
      if constexpr (Rule::kNumStates > 0) {
        prefetch(first + at, strip);
      }
      if constexpr (Rule::kNumStates > 1) {
        prefetch(second + at, strip);
      }
      update_run<Rule>(scalars, master + at, gradient + at, from_element(first, at),
                       from_element(second, at), from_element(out, at), strip);
    }
    if (is_in_place) {
      std::memcpy(parameter, rounded, static_cast<std::size_t>(numel) * sizeof(Parameter));
    } else if (goes_through_block) {
      store_past_caches(parameter, rounded, sizeof(rounded));
    }
    i += numel;
  }
  if (is_streamed) {
    fence_stores();
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
  } else if (span.gradient_dtype == DType::kBFloat16) {
    update_parameter<Rule, BFloat16>(scalars, span, begin, end);
  } else {
    update_parameter<Rule, Float16>(scalars, span, begin, end);
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

template <typename Value>
TESSERA_INLINE double block_sum(const Value* values, std::int64_t numel) {
  double lanes[kNormLanes] = {};
  std::int64_t begin = 0;
  for (; begin + kNormLanes <= numel; begin += kNormLanes) {
    for (int lane = 0; lane < kNormLanes; ++lane) {
      const double value = widened(values[begin + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; begin + lane < numel; ++lane) {
    const double value = widened(values[begin + lane]);
    lanes[lane] += value * value;
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

TESSERA_INLINE double block_sum_any(const void* values, DType dtype, std::int64_t numel) {
  if (dtype == DType::kFloat32) {
    return block_sum(static_cast<const float*>(values), numel);
  }
  if (dtype == DType::kBFloat16) {
    return block_sum(static_cast<const BFloat16*>(values), numel);
  }
  return block_sum(static_cast<const Float16*>(values), numel);
}

template <typename Value>
TESSERA_INLINE void add_elements(float* __restrict values, const Value* __restrict addend,
                                 std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    values[i] += widened(addend[i]);
  }
}

TESSERA_INLINE void add_any(float* values, const void* addend, DType dtype, std::int64_t numel) {
  if (dtype == DType::kFloat32) {
    add_elements(values, static_cast<const float*>(addend), numel);
  } else if (dtype == DType::kBFloat16) {
    add_elements(values, static_cast<const BFloat16*>(addend), numel);
  } else {
    add_elements(values, static_cast<const Float16*>(addend), numel);
  }
}

// A strip of all addends at a time: sums stay in registers, and memory is read as that many streams
// at once, which hides more of its latency than one after the other.
constexpr std::int64_t kSumStrip = 64;

TESSERA_INLINE float joined(std::uint16_t high, std::uint16_t low) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16 | low);
}

// Elements [begin, begin + numel): a whole strip, or a few behind the last.
template <typename Value, bool kIsJoined>
TESSERA_INLINE void sum_strip(float* __restrict sum, std::span<const void* const> addends,
                              std::int64_t begin, std::int64_t numel) {
  const auto from = [&]<typename Type>(std::size_t k, Type /*tag*/) {
    const Type* const values = static_cast<const Type*>(addends[k]) + begin;
    prefetch(values, numel);
    return values;
  };
  float lanes[kSumStrip];
  if constexpr (kIsJoined) {
    const std::uint16_t* const high = from(0, std::uint16_t{});
    const std::uint16_t* const low = from(1, std::uint16_t{});
    for (std::int64_t lane = 0; lane < numel; ++lane) {
      lanes[lane] = joined(high[lane], low[lane]);
    }
  } else {
    const Value* const values = from(0, Value{});
    for (std::int64_t lane = 0; lane < numel; ++lane) {
      lanes[lane] = widened(values[lane]);
    }
  }
  for (std::size_t k = kIsJoined ? 2 : 1; k < addends.size(); ++k) {
    const Value* const values = from(k, Value{});
    for (std::int64_t lane = 0; lane < numel; ++lane) {
      lanes[lane] += widened(values[lane]);
    }
  }
  std::memcpy(sum + begin, lanes, static_cast<std::size_t>(numel) * sizeof(float));
}

template <typename Value, bool kIsJoined>
TESSERA_INLINE void sum_elements(float* __restrict sum, std::span<const void* const> addends,
                                 std::int64_t numel) {
  std::int64_t begin = 0;
  for (; begin + kSumStrip <= numel; begin += kSumStrip) {
    sum_strip<Value, kIsJoined>(sum, addends, begin, kSumStrip);
  }
  if (begin < numel) {
    sum_strip<Value, kIsJoined>(sum, addends, begin, numel - begin);
  }
}

TESSERA_INLINE void sum_any(float* sum, std::span<const void* const> addends, DType dtype,
                            bool is_joined, std::int64_t numel) {
  if (dtype == DType::kFloat32) {
    sum_elements<float, false>(sum, addends, numel);
  } else if (dtype == DType::kBFloat16) {
    is_joined ? sum_elements<BFloat16, true>(sum, addends, numel)
              : sum_elements<BFloat16, false>(sum, addends, numel);
  } else {
    is_joined ? sum_elements<Float16, true>(sum, addends, numel)
              : sum_elements<Float16, false>(sum, addends, numel);
  }
}

TESSERA_INLINE void split_elements(void* high, void* low, const float* values, std::int64_t numel) {
  auto* const upper = static_cast<std::uint16_t*>(high);
  auto* const lower = static_cast<std::uint16_t*>(low);
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    upper[i] = static_cast<std::uint16_t>(bits >> 16);
    lower[i] = static_cast<std::uint16_t>(bits);
  }
}

template <typename To, typename From>
TESSERA_INLINE void convert_elements(To* __restrict to, const From* __restrict from, float scale,
                                     std::int64_t numel) {
  if (scale == 1.0F) {
    if constexpr (std::is_same_v<To, From>) {
      std::memcpy(to, from, static_cast<std::size_t>(numel) * sizeof(To));
    } else {
      for (std::int64_t i = 0; i < numel; ++i) {
        narrow(widened(from[i]), to[i]);
      }
    }
    return;
  }
  for (std::int64_t i = 0; i < numel; ++i) {
    narrow(widened(from[i]) * scale, to[i]);
  }
}

template <typename From>
TESSERA_INLINE void convert_from(void* to, DType to_dtype, const void* from, float scale,
                                 std::int64_t numel) {
  const auto* given = static_cast<const From*>(from);
  if (to_dtype == DType::kFloat32) {
    convert_elements(static_cast<float*>(to), given, scale, numel);
  } else if (to_dtype == DType::kBFloat16) {
    convert_elements(static_cast<BFloat16*>(to), given, scale, numel);
  } else {
    convert_elements(static_cast<Float16*>(to), given, scale, numel);
  }
}

TESSERA_INLINE void convert_any(void* to, DType to_dtype, const void* from, DType from_dtype,
                                float scale, std::int64_t numel) {
  if (from_dtype == DType::kFloat32) {
    convert_from<float>(to, to_dtype, from, scale, numel);
  } else if (from_dtype == DType::kBFloat16) {
    convert_from<BFloat16>(to, to_dtype, from, scale, numel);
  } else {
    convert_from<Float16>(to, to_dtype, from, scale, numel);
  }
}

// An attribute cannot stand in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TESSERA_LOOPS(suffix, name, attribute)                                                    \
  attribute void update_##suffix(ElementRule rule, const ElementScalars& scalars,                 \
                                 const UpdateSpan& span, std::int64_t begin, std::int64_t end) {  \
    update_any(rule, scalars, span, begin, end);                                                  \
  }                                                                                               \
  attribute double block_sum_##suffix(const float* values, std::int64_t numel) {                  \
    return block_sum(values, numel);                                                              \
  }                                                                                               \
  attribute double any_block_sum_##suffix(const void* values, DType dtype, std::int64_t numel) {  \
    return block_sum_any(values, dtype, numel);                                                   \
  }                                                                                               \
  attribute void add_##suffix(float* values, const void* addend, DType dtype,                     \
                              std::int64_t numel) {                                               \
    add_any(values, addend, dtype, numel);                                                        \
  }                                                                                               \
  attribute void sum_##suffix(float* sum, std::span<const void* const> addends, DType dtype,      \
                              bool is_joined, std::int64_t numel) {                               \
    sum_any(sum, addends, dtype, is_joined, numel);                                               \
  }                                                                                               \
  attribute void split_##suffix(void* high, void* low, const float* values, std::int64_t numel) { \
    split_elements(high, low, values, numel);                                                     \
  }                                                                                               \
  attribute void convert_##suffix(void* to, DType to_dtype, const void* from, DType from_dtype,   \
                                  float scale, std::int64_t numel) {                              \
    convert_any(to, to_dtype, from, from_dtype, scale, numel);                                    \
  }                                                                                               \
  constexpr Loops loops_##suffix = {                                                              \
      name,         update_##suffix, block_sum_##suffix, any_block_sum_##suffix,                  \
      add_##suffix, sum_##suffix,    split_##suffix,     convert_##suffix};
#define TESSERA_TABLE_ENTRY(suffix, name, attribute) loops_##suffix,
// NOLINTEND(bugprone-macro-parentheses)

TESSERA_PER_INSTRUCTION_SET(TESSERA_LOOPS)
constexpr Loops kLoops[] = {TESSERA_PER_INSTRUCTION_SET(TESSERA_TABLE_ENTRY)};

}  // namespace

std::span<const Loops> runnable_loops() {
  static const std::size_t num_runnable = count_runnable_sets();
  return std::span<const Loops>(kLoops).first(num_runnable);
}

}  // namespace tessera::optim
