#include "models/gpt_modules.h"

#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "models/gpt_chunked_loss.h"
#include "models/gpt_names.h"

namespace tessera::models {
namespace {

// x: [batch, length, inputs].
at::Tensor linear(const at::Tensor& x, const Weights& weights) {
  if (!weights->adapter_a.defined()) {
    return at::linear(x, weights->weight, weights->bias);
  }
  // On rows, as the layer itself is computed: the adapter's product is then added in place, with no
  // tensor of the output's size, and rounded once together with the layer's. The layer goes first,
  // so that in backward the adapter's gradient of x comes first, and x is free for the layer's.
  const at::Tensor rows = x.flatten(0, 1);
  at::Tensor y = at::linear(rows, weights->weight, weights->bias);
  const at::Tensor low = at::mm(rows, weights->adapter_a.t());
  y.addmm_(low, weights->adapter_b.t(), /*beta=*/1, /*alpha=*/weights->adapter_scale);
  return y.view({x.size(0), x.size(1), y.size(1)});
}

at::Tensor layer_norm(const at::Tensor& x, const Weights& weights) {
  return at::layer_norm(x, weights->weight.sizes(), weights->weight, weights->bias, kGptNormEps);
}

Weights make_linear(std::int64_t in, std::int64_t out, const GptOptions& gpt,
                    const ParamOptions& options) {
  auto weights =
      std::make_shared<WeightsImpl>(at::IntArrayRef{out, in}, at::IntArrayRef{out}, options);
  if (gpt.adapter_rank > 0) {
    weights->add_adapter(gpt, options);
  }
  return weights;
}

Weights make_norm(std::int64_t width, const ParamOptions& options) {
  return std::make_shared<WeightsImpl>(at::IntArrayRef{width}, at::IntArrayRef{width}, options);
}

// A table of embeddings, or a linear layer without bias.
Weights make_matrix(std::int64_t rows, std::int64_t columns, const ParamOptions& options) {
  return std::make_shared<WeightsImpl>(at::IntArrayRef{rows, columns}, at::IntArrayRef{}, options);
}

}  // namespace

WeightsImpl::WeightsImpl(at::IntArrayRef weight_sizes, at::IntArrayRef bias_sizes,
                         const ParamOptions& options) {
  weight = register_parameter("weight", at::empty(weight_sizes, options.tensor), options.trained);
  if (!bias_sizes.empty()) {
    bias = register_parameter("bias", at::empty(bias_sizes, options.tensor), options.trained);
  }
}

void WeightsImpl::add_adapter(const GptOptions& gpt, const ParamOptions& options) {
  const auto add = [&](const char* name, std::int64_t rows, std::int64_t columns) {
    return register_parameter(name, at::empty({rows, columns}, options.tensor),
                              options.adapters_trained);
  };
  adapter_a = add(kAdapterA, gpt.adapter_rank, weight.size(1));
  adapter_b = add(kAdapterB, weight.size(0), gpt.adapter_rank);
  adapter_scale = gpt.adapter_scale();
}

EmbeddingImpl::EmbeddingImpl(const GptOptions& gpt, const ParamOptions& options) {
  tokens_ = register_module("tokens", make_matrix(gpt.vocabulary, gpt.width, options));
  positions_ = register_module("positions", make_matrix(gpt.sequence, gpt.width, options));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  const std::int64_t length = ids.size(1);
  if (!position_ids_.defined() || position_ids_.numel() != length ||
      position_ids_.device() != ids.device()) {
    position_ids_ = at::arange(length, ids.options());
  }
  return at::embedding(tokens_->weight, ids) + at::embedding(positions_->weight, position_ids_);
}

at::Tensor EmbeddingImpl::embed(const at::Tensor& ids, std::int64_t begin) const {
  return at::embedding(tokens_->weight, ids) + positions_->weight.narrow(0, begin, ids.size(1));
}

AttentionImpl::AttentionImpl(const GptOptions& gpt, const ParamOptions& options)
    : heads_(gpt.heads) {
  qkv_ = register_module("qkv", make_linear(gpt.width, 3 * gpt.width, gpt, options));
  out_ = register_module("out", make_linear(gpt.width, gpt.width, gpt, options));
}

std::vector<at::Tensor> AttentionImpl::project(const at::Tensor& x) const {
  const std::int64_t width = x.size(2);
  // Taken apart before heads and tokens change places: the three gradients then go back into one
  // tensor by a single copy, as they are in memory. The other way round it would take two.
  std::vector<at::Tensor> qkv =
      linear(x, qkv_).view({x.size(0), x.size(1), 3, heads_, width / heads_}).unbind(2);
  for (at::Tensor& each : qkv) {
    each = each.transpose(1, 2);
  }
  return qkv;
}

at::Tensor AttentionImpl::join(const at::Tensor& y) const {
  return linear(y.transpose(1, 2).flatten(2), out_);
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const std::vector<at::Tensor> qkv = project(x);
  return join(at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                               /*dropout_p=*/0.0, /*is_causal=*/true));
}

at::Tensor AttentionImpl::extend(const at::Tensor& x, const KeyValues& past,
                                 std::int64_t num_past) const {
  const std::vector<at::Tensor> qkv = project(x);
  const std::int64_t length = x.size(1);
  const std::int64_t total = num_past + length;
  past.keys.narrow(2, num_past, length).copy_(qkv[1]);
  past.values.narrow(2, num_past, length).copy_(qkv[2]);
  // A single token sees all there are. The operator's own mask is for as many queries as keys.
  const bool is_causal = num_past == 0 && length > 1;
  std::optional<at::Tensor> mask;
  if (num_past > 0 && length > 1) {
    mask = at::ones({length, total}, x.options().dtype(at::kBool)).tril(num_past);
  }
  return join(at::scaled_dot_product_attention(qkv[0], past.keys.narrow(2, 0, total),
                                               past.values.narrow(2, 0, total), mask,
                                               /*dropout_p=*/0.0, is_causal));
}

BlockImpl::BlockImpl(const GptOptions& gpt, const ParamOptions& options)
    : gelu_(gpt.gelu_tanh ? "tanh" : "none") {
  norm1_ = register_module("norm1", make_norm(gpt.width, options));
  attention_ = register_module("attention", std::make_shared<AttentionImpl>(gpt, options));
  norm2_ = register_module("norm2", make_norm(gpt.width, options));
  up_ = register_module("up", make_linear(gpt.width, 4 * gpt.width, gpt, options));
  down_ = register_module("down", make_linear(4 * gpt.width, gpt.width, gpt, options));
}

at::Tensor BlockImpl::feed_forward(const at::Tensor& attended) const {
  return attended + linear(at::gelu(linear(layer_norm(attended, norm2_), up_), gelu_), down_);
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  return feed_forward(x + attention_->forward(layer_norm(x, norm1_)));
}

at::Tensor BlockImpl::extend(const at::Tensor& x, const KeyValues& past,
                             std::int64_t num_past) const {
  return feed_forward(x + attention_->extend(layer_norm(x, norm1_), past, num_past));
}

HeadImpl::HeadImpl(const GptOptions& gpt, const ParamOptions& options, const at::Tensor& tied)
    : loss_chunk_(gpt.loss_chunk), weight_(tied) {
  norm_ = register_module("norm", make_norm(gpt.width, options));
  if (!weight_.defined()) {
    weight_ = register_module("head", make_matrix(gpt.vocabulary, gpt.width, options))->weight;
  }
}

at::Tensor HeadImpl::forward(const at::Tensor& x, const at::Tensor& targets) {
  const at::Tensor hidden = layer_norm(x, norm_).flatten(0, 1);
  if (loss_chunk_ > 0) {
    return chunked_cross_entropy(hidden, weight_, targets.flatten(), loss_chunk_);
  }
  at::Tensor logits = at::linear(hidden, weight_);
  logits = logits.to(at::kFloat);  // those of low precision are gone before the softmax needs room
  return at::cross_entropy_loss(logits, targets.flatten());
}

at::Tensor HeadImpl::logits(const at::Tensor& x) const {
  return at::linear(layer_norm(x, norm_), weight_).to(at::kFloat);
}

}  // namespace tessera::models
