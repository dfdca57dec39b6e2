// The modules of the GPT: names, shapes and operators of the PyTorch model in bench/peers.py; and
// what generation computes besides forward, with a cache of keys and values.
//
// Constructors allocate parameters and write nothing: values come by rule (gpt_init()), to the
// shard of each rank or to the whole parameter, so a unit costs its address space and no random
// numbers.
//
// Threads: one at a time, as every module.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "models/gpt.h"

namespace tessera::models {

struct ParamOptions {
  at::TensorOptions tensor;  // type and device
  bool trained = true;
  bool adapters_trained = true;  // of linear layers that have one
};

// The parameters of a linear layer, a layer norm or a table of embeddings; a module of its own
// because names of parameters, such as "up.weight", are made of modules' names.
class WeightsImpl : public torch::nn::Module {
 public:
  // Empty `bias_sizes`: no bias.
  WeightsImpl(at::IntArrayRef weight_sizes, at::IntArrayRef bias_sizes,
              const ParamOptions& options);
  // REQUIRES: of a linear layer, once.
  void add_adapter(const GptOptions& gpt, const ParamOptions& options);

  at::Tensor weight;
  at::Tensor bias;  // undefined where there is none
  // Undefined without an adapter. Its output times the scale is added to the layer's.
  at::Tensor adapter_a;  // [rank, inputs]
  at::Tensor adapter_b;  // [outputs, rank]
  double adapter_scale = 0;
};
using Weights = std::shared_ptr<WeightsImpl>;

class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(const GptOptions& gpt, const ParamOptions& options);
  at::Tensor forward(const at::Tensor& ids);
  // The first of them at position `begin`.
  at::Tensor embed(const at::Tensor& ids, std::int64_t begin) const;
  const at::Tensor& token_weight() const { return tokens_->weight; }

 private:
  Weights tokens_;
  Weights positions_;
  at::Tensor position_ids_;  // of the last length and device: made once, not once per step
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const GptOptions& gpt, const ParamOptions& options);
  at::Tensor forward(const at::Tensor& x);
  // Of tokens after `num_past` others, whose keys and values are in `past`; theirs are added.
  at::Tensor extend(const at::Tensor& x, const KeyValues& past, std::int64_t num_past) const;

 private:
  // Queries, keys and values: [batch, heads, length, width / heads].
  std::vector<at::Tensor> project(const at::Tensor& x) const;
  at::Tensor join(const at::Tensor& y) const;

  std::int64_t heads_;
  Weights qkv_;
  Weights out_;
};

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const GptOptions& gpt, const ParamOptions& options);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor extend(const at::Tensor& x, const KeyValues& past, std::int64_t num_past) const;

 private:
  at::Tensor feed_forward(const at::Tensor& attended) const;

  Weights norm1_;
  std::shared_ptr<AttentionImpl> attention_;
  Weights norm2_;
  Weights up_;
  Weights down_;
  const char* gelu_;  // "none": exact; "tanh"
};

// From the last block's output to the loss: the logits, by far the largest activation, stay inside,
// and with GptOptions::loss_chunk are never whole.
class HeadImpl : public torch::nn::Module {
 public:
  // `tied`: the weight of another module to use as the head's; undefined: a weight of its own.
  HeadImpl(const GptOptions& gpt, const ParamOptions& options, const at::Tensor& tied);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets);
  at::Tensor logits(const at::Tensor& x) const;  // fp32

 private:
  const std::int64_t loss_chunk_;
  Weights norm_;
  at::Tensor weight_;
};

}  // namespace tessera::models
