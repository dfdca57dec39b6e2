// The names and layouts that parameters of a GPT have in files: ours, and GPT-2's.
//
// GPT-2's linear layers are stored as [inputs, outputs], the transpose of ours; queries, keys and
// values are fused in the same order. A tied head is in no file. Adapters beside GPT-2's names have
// those of PEFT, which keeps them in files of their own.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

enum class GptNaming : std::uint8_t { kTessera, kGpt2 };

// As `transformers` writes them: before every name of GPT-2's but the head's.
inline constexpr const char* kGpt2Prefix = "transformer.";

// Ends of names, after the linear layer's: "blocks.3.up.adapter_a" is beside "blocks.3.up.weight".
inline constexpr const char* kAdapterA = "adapter_a";
inline constexpr const char* kAdapterB = "adapter_b";
bool is_adapter(std::string_view param);

struct FileTensor {
  std::string name;
  bool is_transposed = false;
  std::vector<std::int64_t> sizes;
};

// By our name and sizes of a parameter; `prefix` for GPT-2's names alone. REQUIRES: it is a
// parameter of a GPT.
FileTensor file_tensor(GptNaming naming, const std::string& prefix, const std::string& param,
                       const std::vector<std::int64_t>& sizes);

// What a config.json calls its activation: GELU by the tanh formula, under any of its names, or
// exact. `model_type`: where it names none, GPT-2's is the tanh formula.
bool is_tanh_gelu(std::string_view activation, std::string_view model_type);

// Tensors of GPT-2's files that are no parameters: causal masks.
bool is_gpt2_mask(const std::string& name);

}  // namespace tessera::models
