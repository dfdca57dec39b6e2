// The loops over elements on the host, once per instruction set
// (core/vector_loops.h, [Note: instruction sets]).
// All versions give the same bits: element_rules.cuh, [Note: one arithmetic].
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/optim/element_rules.cuh"
#include "tessera/optim/rule.h"

namespace tessera::optim {

// A rule with its arithmetic: sgd is two, with and without momentum.
enum class ElementRule : std::uint8_t { kAdamW, kAdam, kSgd, kMomentum, kLion };
ElementRule element_rule(const RuleOptions& rule);
// `on_device` is left to take_factor().
ElementScalars element_scalars(const RuleOptions& rule, const UpdateScalars& scalars);
// What is in memory when the update runs; null: nothing is. False: the step changes nothing.
bool take_factor(const StepOnDevice* step, ElementScalars& scalars);
// InternalError for what no loop can do: types, missing pointers, a step below 1.
void check_update(const RuleOptions& rule, const UpdateScalars& scalars, const UpdateSpan& span);
// InternalError unless it is fp32, bf16 or fp16; `work` is what was to be done with it.
void check_element_type(const char* work, DType dtype);
// Throws InternalError unless it is aligned to the words of a hash.
void check_hashed(const void* data);

struct Loops {
  std::string_view name;  // "baseline", "x86-64-v3"
  // Elements [begin, end) of a span.
  void (*update)(ElementRule rule, const ElementScalars& scalars, const UpdateSpan& span,
                 std::int64_t begin, std::int64_t end);
  // Of one block: at most kNormBlock elements. See kernels.h.
  double (*block_sum_of_squares)(const float* values, std::int64_t numel);
  // The same for fp32, bf16 or fp16, as are all types below.
  double (*any_block_sum_of_squares)(const void* values, DType dtype, std::int64_t numel);
  void (*add)(float* values, const void* addend, DType dtype, std::int64_t numel);
  // sum[i] = addends[0][i] + addends[1][i] + ..., in fp32 and in this order. `is_joined`: the first
  // two are halves of one. REQUIRES: one at least.
  void (*sum)(float* sum, std::span<const void* const> addends, DType dtype, bool is_joined,
              std::int64_t numel);
  // See kernels.h, [Note: sums in halves].
  void (*split)(void* high, void* low, const float* values, std::int64_t numel);
  // See Kernels::start_convert().
  void (*convert)(void* to, DType to_dtype, const void* from, DType from_dtype, float scale,
                  std::int64_t numel);
};

// What this machine can run, best last.
std::span<const Loops> runnable_loops();
inline const Loops& best_loops() { return runnable_loops().back(); }

}  // namespace tessera::optim
