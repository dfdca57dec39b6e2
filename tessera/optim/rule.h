// Update rules: kernels over spans of elements with named state tensors. A rule is an arithmetic
// for one element (element_rules.cuh), the same on CPU and CUDA, to the bit.
//
// AdamW equals torch::optim::AdamW bit for bit where gradient_scale is 1: explicit fma order, IEEE
// division and root, scalars computed in double and rounded once.
//
// Threads: stateless.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/core/dtype.h"

namespace tessera {
class Config;
}

namespace tessera::optim {

enum class RuleKind : std::uint8_t { kAdamW, kAdam, kSgd, kLion };
std::string_view to_string(RuleKind kind);

struct RuleOptions {
  RuleKind kind = RuleKind::kAdamW;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0;  // sgd
  static RuleOptions from(const Config& config);
};

inline constexpr std::size_t kMaxStates = 2;
// fp32 tensors of the parameter's size: "exp_avg", "exp_avg_sq"; "momentum"; none.
std::span<const std::string_view> state_names(const RuleOptions& rule);
// "master, momentum": what Optimizer::state() may be asked for.
std::string list_states(const RuleOptions& rule);

struct StepOnDevice;  // clip.h

// Scalars of one update, the same for all elements of a parameter.
struct UpdateScalars {
  std::int64_t step = 1;  // of the optimizer, from 1; skipped steps do not count
  double lr = 0;
  double weight_decay_scale = 1;  // of the parameter's weight-decay group
  double gradient_scale = 1;      // clip factor / (loss scale * weight), folded in; rounded once
  // Given: that factor is taken from there when the update runs, and nothing is changed at all if
  // the step skips. Memory that the kernels can read.
  const StepOnDevice* on_device = nullptr;
};

// All in the same memory: the host's or one device's. Spans do not overlap.
struct UpdateSpan {
  float* master = nullptr;  // fp32 weights, updated in place
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;  // fp32, bf16 or fp16
  // Kernels of the host alone: the gradient is a sum in halves, see kernels.h; ...
  const void* low = nullptr;
  // ..., and of more micro-batches, of the same type: the sum of all, made in fp32 in order. The
  // list stays valid as long as what it names.
  std::span<const void* const> later = {};
  std::array<float*, kMaxStates> states{};
  // Low-precision weights, written; null: the master is the parameter. May be the gradient's own
  // memory, if both have one type.
  void* parameter = nullptr;
  DType parameter_dtype = DType::kBFloat16;
  std::int64_t numel = 0;
};

// On the calling thread. The result does not depend on how a tensor is cut into spans.
void update(const RuleOptions& rule, const UpdateScalars& scalars, const UpdateSpan& span);

}  // namespace tessera::optim
