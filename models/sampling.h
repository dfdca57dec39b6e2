// Which token comes next, from a model's logits.
//
// The same logits, options and number of the draw give the same token; ties go to the lower token.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <span>

namespace tessera::models {

struct SamplingOptions {
  double temperature = 1;  // 0: the most likely token, always
  std::int64_t top_k = 0;  // drawn among so many of the most likely; 0: among all
  std::uint64_t seed = 0;
};

// `draw`: the number of the draw in its run. CorruptError for a logit that is not a number.
// REQUIRES: there is a logit.
std::int64_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                          std::uint64_t draw);

}  // namespace tessera::models
