#include "cli/model_file.h"

#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

constexpr const char* kGpt2 = R"({
  "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
  "attn_pdrop": 0.1, "embd_pdrop": 0.1, "bos_token_id": 50256, "layer_norm_epsilon": 1e-05,
  "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "vocab_size": 50257})";

constexpr const char* kLlama = R"({
  "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
  "tie_word_embeddings": false, "vocab_size": 128256})";

std::string refusal_of(const std::string& text) {
  try {
    parse_model_file(text, "config.json");
  } catch (const ConfigError& error) {
    EXPECT_LACKS(error.what(), "\n");
    return error.what();
  }
  return "it was read";
}

TEST(ModelFile, Gpt2IsReadWithWhatDiffers) {
  const ModelFile model = parse_model_file(kGpt2, "config.json");
  EXPECT_EQ(model.width, 768);
  EXPECT_EQ(model.layers, 12);
  EXPECT_EQ(model.heads, 12);
  EXPECT_EQ(model.vocabulary, 50257);
  EXPECT_EQ(model.positions, 1024);
  EXPECT_TRUE(model.tie_head) << "gpt2 without a word about it ties";
  EXPECT_TRUE(model.gelu_tanh);
  ASSERT_EQ(model.notes.size(), 1U);
  EXPECT_HAS(model.notes[0], "dropout of up to 0.1 is left out");
}

TEST(ModelFile, NamesOfOtherFamiliesAreRead) {
  const ModelFile model = parse_model_file(
      R"({"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512,
          "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
          "max_position_embeddings": 2048, "rotary_pct": 0.25, "vocab_size": 50304,
          "layer_norm_eps": 1e-06, "tie_word_embeddings": true, "num_key_value_heads": null})",
      "neox.json");
  EXPECT_EQ(model.width, 512);
  EXPECT_EQ(model.layers, 6);
  EXPECT_EQ(model.heads, 8);
  EXPECT_EQ(model.positions, 2048);
  EXPECT_TRUE(model.tie_head);
  ASSERT_EQ(model.notes.size(), 2U);
  EXPECT_HAS(model.notes[0], "rotary positions become learned ones");
  EXPECT_HAS(model.notes[1], "epsilon 1e-06 becomes 1e-05");
}

TEST(ModelFile, OtherShapesAreRefusedWithAllReasonsAndTheNearestModel) {
  const std::string message = refusal_of(kLlama);
  EXPECT_HAS(message, "num_key_value_heads is 8 for 32 heads");
  EXPECT_HAS(message, "gated (SwiGLU or the like, intermediate_size 14336)");
  EXPECT_HAS(message, "--width 4096 --heads 32 --layers 32 --vocab 128256");
  const std::string shape = R"("n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100)";
  EXPECT_EQ(refusal_of("{" + shape + "}"), "it was read");
  EXPECT_EQ(refusal_of("{" + shape + R"(, "n_inner": 256})"), "it was read");
  EXPECT_HAS(refusal_of("{" + shape + R"(, "n_inner": 128})"), "is 128 wide");
  EXPECT_HAS(refusal_of("{" + shape + R"(, "head_dim": 32})"), "head_dim is 32");
  EXPECT_HAS(refusal_of("{" + shape + R"(, "num_local_experts": 8})"), "8 experts");
}

TEST(ModelFile, WhatIsNoConfigIsRefused) {
  EXPECT_HAS(refusal_of("[1]"), "is not a JSON object");
  EXPECT_HAS(refusal_of("{\"n_embd\": "), "is not a JSON object");
  EXPECT_HAS(refusal_of("{}"), "does not say the width (n_embd or hidden_size");
  for (const char* bad : {"0", "-1", "1.5", "\"768\"", "1e300", "99999999999"}) {
    EXPECT_HAS(refusal_of(std::string("{\"n_embd\": ") + bad + "}"),
               "not a whole number from 1 to 2147483647")
        << bad << ": " << refusal_of(std::string("{\"n_embd\": ") + bad + "}");
  }
  const testing::TemporaryDirectory folder;
  EXPECT_THROW(read_model_file(folder.path() / "none.json"), ConfigError);
  EXPECT_THROW(read_model_file(folder.path()), ConfigError);
}

}  // namespace
}  // namespace tessera::cli
