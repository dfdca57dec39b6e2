#include "models/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr const char* kDrawStream = "generate";
constexpr std::uint64_t kDrawSteps = std::uint64_t{1} << 53;  // of a double in [0, 1)

// The k most likely, in the order of tokens.
std::vector<std::int64_t> most_likely(std::span<const float> logits, std::int64_t k) {
  std::vector<std::int64_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), std::int64_t{0});
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  if (k > 0 && k < num_tokens) {
    const auto logit = [&](std::int64_t token) { return logits[static_cast<std::size_t>(token)]; };
    std::nth_element(tokens.begin(), tokens.begin() + k - 1, tokens.end(),
                     [&](std::int64_t a, std::int64_t b) {
                       return logit(a) > logit(b) || (logit(a) == logit(b) && a < b);
                     });
    tokens.resize(static_cast<std::size_t>(k));
    std::sort(tokens.begin(), tokens.end());
  }
  return tokens;
}

}  // namespace

std::int64_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                          std::uint64_t draw) {
  TESSERA_INVARIANT(!logits.empty(), "no logits to draw a token from");
  TESSERA_CHECK(std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }),
                CorruptError,
                "the model's logits are not numbers: its parameters, or what it computes of them "
                "in this precision, are not finite");
  const auto most = std::max_element(logits.begin(), logits.end());
  if (options.temperature == 0 || std::isinf(*most)) {
    return most - logits.begin();
  }
  const std::vector<std::int64_t> tokens = most_likely(logits, options.top_k);
  std::vector<double> sums;  // of probabilities up to each token, times a constant
  double sum = 0;
  for (const std::int64_t token : tokens) {
    const double apart = static_cast<double>(logits[static_cast<std::size_t>(token)]) - *most;
    sum += std::exp(apart / options.temperature);
    sums.push_back(sum);
  }
  const double drawn =
      static_cast<double>(CounterRandom(options.seed, kDrawStream).below(draw, kDrawSteps)) /
      static_cast<double>(kDrawSteps);
  // The first whose sum lies above; rounding may put the last one's at the draw itself.
  const auto found = std::upper_bound(sums.begin(), sums.end() - 1, drawn * sum);
  return tokens[static_cast<std::size_t>(found - sums.begin())];
}

}  // namespace tessera::models
