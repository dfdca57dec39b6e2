// `--model FILE`: the shape of a model from a config.json in the style of Hugging Face, as far as
// the GPT of models/gpt.h can have it.
//
// Read are (the first name of each that is there)
//   width        n_embd, hidden_size, d_model
//   layers       n_layer, num_hidden_layers
//   heads        n_head, num_attention_heads
//   positions    n_positions, max_position_embeddings, n_ctx
//   vocabulary   vocab_size
//   tied head    tie_word_embeddings; without it true for gpt2, and false for all others
//   GELU         activation_function, hidden_act: by the tanh formula for gelu_new and its other
//                names, and for gpt2 without a word about it
//
// What would give parameters other shapes is refused: fewer key and value heads than heads, a head
// of another size than width / heads, a feed-forward that is gated or not four times as wide,
// experts. What only computes something else on the same shapes becomes a note: rotary positions,
// another activation or norm, dropout. All else in the file is ignored: it is about tokens and
// files.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

struct ModelFile {
  std::int64_t width = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t vocabulary = 0;
  std::optional<std::int64_t> positions;
  bool tie_head = false;
  bool gelu_tanh = false;
  std::vector<std::string> notes;  // one line each, for the user
};

// Throws ConfigError, in one line, with the file and the key.
ModelFile read_model_file(const std::string& path);
ModelFile parse_model_file(const std::string& text, const std::string& name);

}  // namespace tessera::cli
