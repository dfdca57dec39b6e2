// The arithmetic of every update rule, for one element: included by the loops of the host
// (update_loops.cpp) and by the kernels of the GPU, so that there is one of each.
//
// [Note: one arithmetic]
// Every operation rounds once and in the order written here: compilers must not fuse (the host's
// -ffp-contract=off, nvcc's -fmad=false), divisions and roots are IEEE's, and where torch fuses, an
// fma says so. AdamW, Adam and SGD follow ATen's vector code on CPUs that have fma, operator by
// operator: add(a, b, alpha) is fma(b, alpha, a), addcmul(a, b, c, alpha) is fma(alpha * b, c, a),
// and addcdiv(a, b, c, alpha) is a + (alpha * b) / c. Two things make a torch differ from that, and
// from another torch: on x86-64 its square root is MKL's, whose AVX-512 version misses the rounded
// root of 0.6 % of all numbers by one unit in the last place (its AVX2 version and other
// processors' roots are exact); and without fma (x86-64 before AVX2) ATen rounds products. We take
// the IEEE root everywhere.
//
// Results that are NaN are NaN everywhere, but a NaN's payload is the machine's own.
//
// Threads: stateless.
#pragma once

#include <cmath>

#include "tessera/core/host_device.cuh"

namespace tessera::optim {

// Scalars of one update as the elements see them: computed in double, rounded once. See
// element_scalars() in update_loops.h.
struct ElementScalars {
  float gradient_scale = 1;
  float weight_factor = 1;  // decoupled decay: 1 - lr * weight_decay
  float weight_decay = 0;   // L2
  float beta1 = 0;
  float beta1_rest = 1;  // 1 - beta1
  float beta2 = 0;
  float beta2_rest = 1;       // 1 - beta2
  float root_correction = 1;  // sqrt(1 - beta2^step)
  float eps = 0;
  float step_size = 0;  // what the update is multiplied by; negative
};

namespace element {

TESSERA_HOST_DEVICE inline float with_l2(const ElementScalars& s, float gradient, float weight) {
  // Left out where there is none, as torch does: 0 * infinity is not 0.
  return s.weight_decay == 0.0F ? gradient : ::fmaf(weight, s.weight_decay, gradient);
}

TESSERA_HOST_DEVICE inline void adam_step(const ElementScalars& s, float gradient, float& weight,
                                          float& exp_avg, float& exp_avg_sq) {
  exp_avg = ::fmaf(gradient, s.beta1_rest, exp_avg * s.beta1);
  exp_avg_sq = ::fmaf(s.beta2_rest * gradient, gradient, exp_avg_sq * s.beta2);
  const float denominator = ::sqrtf(exp_avg_sq) / s.root_correction + s.eps;
  weight = weight + (s.step_size * exp_avg) / denominator;
}

}  // namespace element

// Rules: `first` and `second` are the states in the order of state_names(); a rule with fewer
// leaves the rest alone. `gradient` is scaled already.

struct AdamWElement {
  static constexpr int kNumStates = 2;
  TESSERA_HOST_DEVICE static void update(const ElementScalars& s, float gradient, float& weight,
                                         float& first, float& second) {
    weight = weight * s.weight_factor;
    element::adam_step(s, gradient, weight, first, second);
  }
};

struct AdamElement {
  static constexpr int kNumStates = 2;
  TESSERA_HOST_DEVICE static void update(const ElementScalars& s, float gradient, float& weight,
                                         float& first, float& second) {
    element::adam_step(s, element::with_l2(s, gradient, weight), weight, first, second);
  }
};

struct SgdElement {
  static constexpr int kNumStates = 0;
  TESSERA_HOST_DEVICE static void update(const ElementScalars& s, float gradient, float& weight,
                                         float& /*first*/, float& /*second*/) {
    weight = ::fmaf(element::with_l2(s, gradient, weight), s.step_size, weight);
  }
};

// beta1 is the momentum; in the first step it is -0, and the momentum's zeros become the gradient
// itself: -0 + x is x, also for x = -0.
struct MomentumElement {
  static constexpr int kNumStates = 1;
  TESSERA_HOST_DEVICE static void update(const ElementScalars& s, float gradient, float& weight,
                                         float& first, float& /*second*/) {
    first = first * s.beta1 + element::with_l2(s, gradient, weight);
    weight = ::fmaf(first, s.step_size, weight);
  }
};

struct LionElement {
  static constexpr int kNumStates = 1;
  TESSERA_HOST_DEVICE static void update(const ElementScalars& s, float gradient, float& weight,
                                         float& first, float& /*second*/) {
    const float direction = ::fmaf(gradient, s.beta1_rest, first * s.beta1);
    // Zero and NaN are their own sign: a NaN must not vanish.
    const float sign = direction > 0.0F ? 1.0F : (direction < 0.0F ? -1.0F : direction);
    weight = ::fmaf(sign, s.step_size, weight * s.weight_factor);
    first = ::fmaf(gradient, s.beta2_rest, first * s.beta2);
  }
};

}  // namespace tessera::optim
