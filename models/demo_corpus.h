// The corpus that needs no file: sentences of a toy grammar, such as
//
//   the old baker sells bread for the young sailor.
//
// What a person does, and with what, follows from who it is, so there are a few hundred
// different sentences, and most letters follow from those before them. A sequence is as many
// sentences as it takes, drawn by (seed, its number), and begins somewhere inside the first; no
// text is stored and none comes twice.
//
// Tokens are not bytes but places in an alphabet of 28 symbols: the space is 0, the letters a to z
// are 1 to 26, the full stop is 27. So any vocabulary of at least 28 can be trained on it.
//
// Threads: stateless; read() from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/data.h"

namespace tessera::models {

inline constexpr std::int64_t kDemoSymbols = 28;

// Throws ConfigError for a vocabulary that is too small.
std::unique_ptr<TokenSource> make_demo_tokens(const DataOptions& options);

// Every sentence of the grammar, once, each with the space that ends it.
std::vector<std::string> demo_sentences();

// A character's token; nothing for one that is not of the alphabet.
std::optional<std::int64_t> demo_token(char symbol);
// A token's character; '?' for a token that is not one of the corpus.
char demo_symbol(std::int64_t token);

}  // namespace tessera::models
