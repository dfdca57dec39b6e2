// Prompts as tokens, and tokens as text, by what the tokens of a run's data stand for: bytes of
// text, symbols of the demo corpus, or numbers between spaces.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/data.h"

namespace tessera::models {

// Of sources as a checkpoint has them, one per line: numbers where they are not known, or where
// they do not agree.
TokenMeaning token_meaning_of(const std::string& sources);

// How many tokens have a text; 0: all.
std::int64_t num_text_symbols(TokenMeaning meaning);

// ConfigError, with the place, for what is no token.
std::vector<std::int64_t> prompt_tokens(TokenMeaning meaning, std::string_view prompt);

// `is_first`: nothing comes before it.
std::string token_text(TokenMeaning meaning, std::int64_t token, bool is_first);

}  // namespace tessera::models
