#include "models/gpt_generation.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include "models/gpt.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

// The tokens so far, and what of them the model sees.
class Continuation {
 public:
  Continuation(Gpt& gpt, std::vector<std::int64_t> tokens, bool use_cache)
      : gpt_(gpt), tokens_(std::move(tokens)), use_cache_(use_cache) {}

  void add(std::int64_t token) { tokens_.push_back(token); }

  // Of the token after the last: [vocabulary], on the CPU.
  at::Tensor next_logits() {
    const auto num_tokens = static_cast<std::int64_t>(tokens_.size());
    if (num_tokens - begin_ > gpt_.options().sequence) {
      begin_ = num_tokens - tokens_kept(gpt_.options().sequence);
      cache_.num_tokens = 0;
    }
    const auto new_begin = static_cast<std::ptrdiff_t>(begin_ + cache_.num_tokens);
    const std::span<const std::int64_t> fresh(tokens_.begin() + new_begin, tokens_.end());
    const at::Tensor ids =
        at::tensor(fresh, at::kLong).unsqueeze(0).to(gpt_.params().front().tensor.device());
    return gpt_.next_logits(ids, use_cache_ ? &cache_ : nullptr).squeeze(0).cpu();
  }

 private:
  Gpt& gpt_;
  std::vector<std::int64_t> tokens_;
  const bool use_cache_;
  std::int64_t begin_ = 0;  // of the tokens that the model sees
  KeyValueCache cache_;     // of tokens from there on
};

}  // namespace

void check_prompt(const std::vector<std::int64_t>& prompt, std::int64_t vocabulary) {
  TESSERA_CHECK(!prompt.empty(), ConfigError,
                "nothing to continue: the prompt has no tokens; give at least one");
  for (const std::int64_t token : prompt) {
    TESSERA_CHECK(token >= 0 && token < vocabulary, ConfigError, "prompt: token ", token,
                  " is not in the vocabulary of ", vocabulary);
  }
}

std::int64_t tokens_kept(std::int64_t num_positions) {
  return std::max<std::int64_t>(num_positions / 2, 1);
}

void generate(Gpt& gpt, std::vector<std::int64_t> prompt, const GenerationOptions& options,
              const std::function<void(std::int64_t token)>& next) {
  const std::int64_t vocabulary = gpt.options().vocabulary;
  check_prompt(prompt, vocabulary);
  const std::int64_t num_symbols =
      options.num_symbols > 0 ? std::min(options.num_symbols, vocabulary) : vocabulary;
  Continuation continuation(gpt, std::move(prompt), options.use_cache);
  for (std::int64_t draw = 0; draw < options.num_tokens; ++draw) {
    const at::Tensor logits = continuation.next_logits();
    const std::span<const float> values(logits.const_data_ptr<float>(),
                                        static_cast<std::size_t>(num_symbols));
    const std::int64_t token =
        sample_token(values, options.sampling, static_cast<std::uint64_t>(draw));
    continuation.add(token);
    next(token);
  }
}

}  // namespace tessera::models
