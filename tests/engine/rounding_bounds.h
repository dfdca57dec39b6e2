// How far sharded training may be from the reference, which adds in another order.
//
// fp32: the project's promise between numbers of ranks.
//
// Low precision: ranks round their own gradients to the type of the parameters where the reference
// rounds those of the whole batch. A gradient that reaches a parameter has passed through about k =
// 16 roundings of relative size u in each block, so the two differ by e = sqrt(16 * layers) * u of
// their size, if roundings are independent. AdamW's steps do not depend on the size of a gradient
// but on its sign: two runs step apart, by 2 * lr, where a gradient is smaller than the difference,
// which for about normal values is a fraction e of the elements, and by lr * e elsewhere. After n
// steps the difference of n * 2 * lr * sqrt(e) per root of an element stands against a weight of
// about 1 / sqrt(3 * width) (uniform within 1 / sqrt(width)); norms' weights are larger, and their
// biases, which start at zero, have moved by about n * lr. The factor 2 * sqrt(e) therefore bounds
// them all. Norms and losses are means over all elements, in which signs do not matter: e bounds
// them.
#pragma once

#include <cmath>

#include "models/gpt.h"
#include "tessera/core/dtype.h"

namespace tessera::testing {

// Relative, as Difference has them.
struct ParityBounds {
  double step = 2e-6;   // losses and norms
  double param = 2e-6;  // of a tensor's norm
};

inline ParityBounds parity_bounds(const models::GptOptions& model) {
  if (model.dtype == DType::kFloat32) {
    return {};
  }
  const double unit = model.dtype == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
  const double error = std::sqrt(16.0 * static_cast<double>(model.layers)) * unit;
  return {error, 2 * std::sqrt(error)};
}

// Of elements that only noise moves: two noises, each at most a step of AdamW's largest size, lr,
// apart in every step.
inline double noise_bound(std::int64_t num_steps) {
  return 2 * 1e-3 * static_cast<double>(num_steps);
}

}  // namespace tessera::testing
