// A model that continues a sequence, token by token.
//
// The model sees the last tokens, at most as many as it has positions. When they are all taken it
// begins anew with the last half of them: positions are learned, so tokens cannot move to others
// without being computed again. What it sees does not depend on the cache, so with and without one
// the logits are the same but for rounding.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/sampling.h"

namespace tessera::models {

class Gpt;

struct GenerationOptions {
  std::int64_t num_tokens = 0;
  std::int64_t num_symbols = 0;  // tokens from here on are never drawn; 0: all may be
  bool use_cache = true;         // of keys and values; without it every token costs all before it
  SamplingOptions sampling;
};

// Throws ConfigError for a prompt without tokens, or with one beyond the vocabulary.
void check_prompt(const std::vector<std::int64_t>& prompt, std::int64_t vocabulary);

// Of a model that begins anew.
std::int64_t tokens_kept(std::int64_t num_positions);

// Calls `next` with every new token. The prompt is checked first.
void generate(Gpt& gpt, std::vector<std::int64_t> prompt, const GenerationOptions& options,
              const std::function<void(std::int64_t token)>& next);

}  // namespace tessera::models
