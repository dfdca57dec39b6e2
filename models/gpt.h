// GPT as in bench/peers.py: learned positions, pre-norm, fused qkv with bias, exact GELU
// (or GPT-2's), untied head without bias (unless tied), loss in fp32. Parameter names are those of
// the PyTorch model.
//
// Built unit by unit: "tokens"+"positions" are one unit, each block is one, "norm"+"head" are one.
// With an engine the units are sharded; without one the same code is a plain LibTorch model.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/init.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/stored_format.h"

namespace tessera {
class Engine;
}

namespace tessera::models {

// Beyond these the number of parameters would leave 64 bits; every real model is far below.
inline constexpr std::int64_t kMaxGptWidth = 1 << 17;
inline constexpr std::int64_t kMaxGptLayers = 1 << 16;

inline constexpr double kGptNormEps = 1e-5;  // of all layer norms

struct GptOptions {
  std::int64_t width = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t vocabulary = 0;
  std::int64_t sequence = 0;
  bool recompute = false;
  bool tie_head = false;
  // GELU by the tanh formula, as GPT-2 has it ("gelu_new"), in place of the exact one.
  bool gelu_tanh = false;
  std::int64_t freeze = 0;  // the first N blocks are not trained; gradients pass through them
  // Low-rank adapters (LoRA) on the four linear layers of each block: with A [rank, inputs] and
  // B [outputs, rank] a layer adds alpha / rank * B * A * x. B starts as zero, so that training
  // starts from the model without them. Those of frozen blocks are frozen, too.
  std::int64_t adapter_rank = 0;  // 0: none
  double adapter_alpha = 0;
  bool freeze_base = false;  // trains the adapters alone
  DType dtype = DType::kFloat32;
  // Tokens whose logits exist at a time, in forward and in backward; 0: those of all. In fp16,
  // and in bf16 on a CPU, it costs the head's product once more. See gpt_chunked_loss.h.
  std::int64_t loss_chunk = 0;

  double adapter_scale() const { return adapter_alpha / static_cast<double>(adapter_rank); }
  // Of the embedding, the head, and a block's parameters; REQUIRES: it is one of them.
  bool trains_base() const { return !freeze_base; }
  bool trains_base(std::int64_t block) const { return !freeze_base && block >= freeze; }
  bool trains_adapters(std::int64_t block) const { return adapter_rank > 0 && block >= freeze; }
  // Blocks that no gradient comes to: nothing up to their end is trained.
  std::int64_t num_without_backward() const { return freeze_base ? freeze : 0; }

  // Throws ConfigError with name and value: zero layers, heads that do not divide the width, more
  // frozen blocks than there are, nothing that is trained, ...
  void check() const;
};

// What PEFT and others call lora_alpha, where nobody gives it: a scale of 2.
inline double default_adapter_alpha(std::int64_t rank) { return 2 * static_cast<double>(rank); }

// "tiny", "small", "gpt2-124m", "gpt-1b4", "gpt-7b", "gpt-13b", and "micro". ConfigError lists
// them.
GptOptions gpt_preset(std::string_view name);
std::vector<std::string_view> gpt_preset_names();

// Elements, in closed form.
struct GptSize {
  std::int64_t num_params = 0;    // of all parameters
  std::int64_t largest_unit = 0;  // that one unit uses at most, a tied weight included
};
GptSize gpt_size(const GptOptions& options);

// Operations of a training step per token, those that the model needs: 6 per weight of a product
// (2 forward, 2 for the gradient of its input, 2 for its own; 4 where the weight is frozen), and
// attention's 12 * layers * width * sequence, as if there were no causal mask. A third of both in
// blocks without a backward. Embedding tables are looked up, not multiplied; recomputation is work
// of the engine's, and does not count.
double gpt_flops_per_token(const GptOptions& options);

struct NamedParam {
  std::string name;
  at::Tensor tensor;
};

// What generation keeps of the tokens so far, so that it need not compute them again: keys and
// values by block, each [batch, heads, positions, width / heads] with room for all positions.
struct KeyValues {
  at::Tensor keys;
  at::Tensor values;
};
struct KeyValueCache {
  std::int64_t num_tokens = 0;    // of which it has them; 0 begins anew
  std::vector<KeyValues> blocks;  // made at the first use
};

// Where a GPT's values are: files (gpt_weights.h), or a checkpoint (gpt_checkpoint.h).
class GptSource : public InitSource {
 public:
  // Adapters may be missing, all or none; the base is complete.
  virtual bool has(const std::string& param) const = 0;
};

class Gpt {
 public:
  // Sharded as it is built. Initial values are those of `weights`, each rank reading its own, or by
  // rule where it has none. REQUIRES: `seed` is the one of the engine's config.
  Gpt(const GptOptions& options, Engine& engine, std::uint64_t seed,
      std::shared_ptr<const GptSource> weights = nullptr);
  // Plain, on `device`; the same initial values. Frozen parameters that `stored` is for get the
  // values that they have when they are stored so, in the model's type.
  Gpt(const GptOptions& options, at::Device device, std::uint64_t seed,
      std::shared_ptr<const GptSource> weights = nullptr, const shard::StoredRule& stored = {});
  ~Gpt();
  Gpt(const Gpt&) = delete;
  Gpt& operator=(const Gpt&) = delete;

  // ids, targets: [batch, up to options().sequence] int64. The mean loss over all tokens, fp32.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets);
  // The logits of the token after the last: [batch, vocabulary], fp32, without gradients. `ids`:
  // [batch, length] int64, after those in the cache, which then has them, too; without one from the
  // first position on. Of a plain model alone.
  at::Tensor next_logits(const at::Tensor& ids, KeyValueCache* cache = nullptr);
  const GptOptions& options() const;
  // In registration order, each once.
  const std::vector<NamedParam>& params() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The rule of one parameter, by its full name: the distributions of PyTorch's own modules, which
// the peers' program has. Embeddings are normal, linear layers uniform within 1 / sqrt(inputs),
// biases included; norms are one and zero. A tied weight starts as a head: logits of normal values
// would be of the size of the root of the width, and training chaotic. Adapters are as PEFT's: A as
// a linear layer's weight (Kaiming-uniform with a = sqrt(5)), B zero.
Init gpt_init(const GptOptions& options, const std::string& name);

// Elements of a parameter whose gradient is zero but for rounding: the biases of keys, since
// softmax does not change when all scores of a query shift alike. AdamW divides a gradient by its
// own size, so it moves them by noise, and no two orders of summation agree there. A comparison of
// two trainings must look at them apart.
shard::ElementRange gpt_noise_elements(const GptOptions& options, const std::string& name);

}  // namespace tessera::models
