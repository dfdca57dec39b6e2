// What the factors of a step are tried on, on the host and on a GPU: sums of squares and scales at
// the ends of their ranges and anywhere between; and what should come out.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tessera/optim/clip.h"
#include "tests/optim/kernel_cases.h"

namespace tessera::optim {

struct StepCase {
  std::vector<double> squares;
  double weight = 1;
  StepInputs inputs;

  double total() const {
    double total = 0;
    for (const double square : squares) {
      total += square;
    }
    return total;
  }
  StepSums sums() const { return {total(), weight, 0.5, {1, 2, 3}}; }
};

// The definition, word by word.
inline StepOnDevice defined_step(const StepCase& test) {
  const double total = test.total();
  const double divisor = test.weight * test.inputs.loss_scale;
  StepOnDevice step{};
  step.gradient_squares = total;
  step.finite = std::isfinite(total) ? 1 : 0;
  const bool gives_mean = test.weight > 0 && std::isfinite(test.weight);
  step.skips = !gives_mean || (!std::isfinite(total) && test.inputs.skips_nonfinite) ? 1 : 0;
  step.grad_norm = std::sqrt(total) / divisor;
  step.gradient_scale = 1.0 / divisor;
  if (std::isfinite(total) && test.inputs.clip_norm > 0) {
    step.gradient_scale *= std::min(1.0, test.inputs.clip_norm / (step.grad_norm + 1e-6));
  }
  return step;
}

// All bits, but any NaN is as good as another.
inline bool same_step(const StepOnDevice& a, const StepOnDevice& b) {
  const auto same = [](double x, double y) {
    return (std::isnan(x) && std::isnan(y)) ||
           std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
  };
  return same(a.gradient_squares, b.gradient_squares) && same(a.grad_norm, b.grad_norm) &&
         same(a.gradient_scale, b.gradient_scale) && a.finite == b.finite && a.skips == b.skips;
}

inline std::string text_of(const StepOnDevice& step) {
  return "squares " + std::to_string(step.gradient_squares) + ", norm " +
         std::to_string(step.grad_norm) + ", scale " + std::to_string(step.gradient_scale) +
         ", finite " + std::to_string(step.finite) + ", skips " + std::to_string(step.skips);
}

inline std::vector<StepCase> step_cases() {
  using Limits = std::numeric_limits<double>;
  std::vector<StepCase> cases;
  for (const double weight : {0.0, -1.0, Limits::infinity(), Limits::quiet_NaN()}) {
    cases.push_back({{2.0, 3.0}, weight, {1, 1, true}});
    cases.push_back({{2.0, 3.0}, weight, {2, 0, false}});
  }
  for (const double squares :
       {0.0, Limits::denorm_min(), Limits::min(), 1e-30, 1e-12, 0.25, 1.0, 2.0, 1e30, 1e300,
        Limits::max(), Limits::infinity(), Limits::quiet_NaN()}) {
    for (const double weight : {Limits::denorm_min(), 1e-300, 1.0, 3.0, 8192.0, 1e300}) {
      for (const double loss_scale : {1.0, 65536.0, 1e-3, 1e200}) {
        for (const double clip_norm : {0.0, Limits::denorm_min(), 1e-6, 1.0, Limits::max()}) {
          for (const bool skips : {false, true}) {
            cases.push_back({{squares}, weight, {loss_scale, clip_norm, skips}});
          }
        }
      }
    }
  }
  std::mt19937_64 random(7);
  const auto positive = [&](double lowest, double highest) {
    return std::exp(std::uniform_real_distribution(std::log(lowest), std::log(highest))(random));
  };
  // None, one, and more than one launch takes; of such different sizes that the order counts.
  for (const std::size_t num_sums : {0U, 1U, 2U, 300U, 480U, 481U, 960U, 1500U}) {
    for (int i = 0; i < 40; ++i) {
      StepCase test;
      for (std::size_t sum = 0; sum < num_sums; ++sum) {
        test.squares.push_back(positive(1e-20, 1e5));
      }
      test.weight = positive(1e-3, 1e6);
      const double loss_scale = positive(1e-3, 1e6);
      test.inputs = {loss_scale, i % 4 == 0 ? 0 : positive(1e-6, 10), i % 2 == 0};
      if (num_sums > 0 && i % 10 == 9) {
        test.squares[random() % num_sums] = i % 20 == 9 ? Limits::infinity() : Limits::quiet_NaN();
      }
      cases.push_back(std::move(test));
    }
  }
  return cases;
}

// Also what the sums of a step are made of, and its factors.
inline bool same_found(const FoundStep& a, const FoundStep& b) {
  const auto same = [](double x, double y) {
    return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  };
  return same_step(a.step, b.step) && same(a.sums.gradient_squares, b.sums.gradient_squares) &&
         same(a.sums.weight, b.sums.weight) && same(a.sums.weighted_loss, b.sums.weighted_loss) &&
         std::equal(std::begin(a.sums.votes), std::end(a.sums.votes), std::begin(b.sums.votes));
}

inline std::vector<const double*> addresses(const double* first, std::size_t count) {
  std::vector<const double*> out;
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back(first + i);
  }
  return out;
}

// Every third task has a factor of its own; the others take that of the step at `step`.
inline std::vector<UpdateTask> with_step(std::vector<UpdateTask> tasks, const StepOnDevice* step) {
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (i % 3 != 2) {
      tasks[i].scalars.gradient_scale = std::numeric_limits<double>::quiet_NaN();
      tasks[i].scalars.on_device = step;
    }
  }
  return tasks;
}

}  // namespace tessera::optim
