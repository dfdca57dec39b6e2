#include "models/gpt.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt_modules.h"
#include "models/gpt_names.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/unit.h"
#include "tessera/quant/block_codec.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kTileNumel = std::int64_t{1} << 20;

Init first_values(const GptOptions& options, const std::shared_ptr<const GptSource>& weights,
                  const std::string& name) {
  return weights != nullptr && weights->has(name) ? Init::from(weights) : gpt_init(options, name);
}

// To blocks and back, a tile at a time. Blocks are those of the whole parameter on any number of
// ranks.
void round_as_stored(const shard::StoredFormat& format, DType dtype, const at::Tensor& host) {
  const std::unique_ptr<comm::Codec> codec = quant::make_cpu_block_codec(format.blocks());
  const std::int64_t tile = format.tile(kTileNumel);
  std::vector<std::byte> wire(codec->wire_bytes(tile));
  auto* const values = static_cast<std::byte*>(host.mutable_data_ptr());
  for (std::int64_t begin = 0; begin < host.numel(); begin += tile) {
    const std::int64_t numel = std::min(tile, host.numel() - begin);
    std::byte* const at = values + static_cast<std::size_t>(begin) * bytes_of(dtype);
    codec->encode(at, dtype, numel, wire.data(), nullptr).wait();
    codec->decode(wire.data(), numel, at, dtype, nullptr).wait();
  }
}

void fill_plain(const Init& init, std::uint64_t seed, const std::string& name,
                const shard::StoredRule& stored, DType dtype, const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = param.is_cpu() ? param : at::empty_like(param, at::kCPU);
  fill_initial(init, seed, name, {0, host.numel()}, dtype, host.mutable_data_ptr());
  const shard::StoredFormat format =
      stored.format_of(name, param.requires_grad(), host.numel(), static_cast<int>(host.dim()));
  if (format.is_encoded()) {
    round_as_stored(format, dtype, host);
  }
  if (!param.is_cpu()) {
    param.copy_(host);
  }
}

}  // namespace

struct Gpt::Impl {
  GptOptions options;
  Unit<EmbeddingImpl> embedding;
  std::vector<Unit<BlockImpl>> blocks;
  Unit<HeadImpl> head;
  std::vector<NamedParam> params;

  // One unit after the other: make_unit(name, prefix of parameters, module, recompute) has dealt
  // with a unit's memory before the next is made.
  template <typename MakeUnit>
  void build(at::Device device, const MakeUnit& make_unit) {
    ParamOptions param_options;
    param_options.tensor =
        at::TensorOptions().dtype(shard::scalar_type_of(options.dtype)).device(device);
    const auto add = [&](const std::string& name, const std::string& prefix, auto module,
                         bool recompute) {
      for (const auto& item : module->named_parameters()) {
        params.push_back({prefix + item.key(), item.value()});
      }
      return make_unit(name, prefix, std::move(module), recompute);
    };
    param_options.trained = options.trains_base();
    embedding =
        add("embedding", "", std::make_shared<EmbeddingImpl>(options, param_options), false);
    for (std::int64_t index = 0; index < options.layers; ++index) {
      param_options.trained = options.trains_base(index);
      param_options.adapters_trained = options.trains_adapters(index);
      const std::string name = "blocks." + std::to_string(index);
      blocks.push_back(add(name, name + ".", std::make_shared<BlockImpl>(options, param_options),
                           options.recompute));
    }
    param_options.trained = options.trains_base();
    const at::Tensor tied = options.tie_head ? embedding->token_weight() : at::Tensor();
    head = add("head", "", std::make_shared<HeadImpl>(options, param_options, tied), false);
  }
};

Gpt::Gpt(const GptOptions& options, Engine& engine, std::uint64_t seed,
         std::shared_ptr<const GptSource> weights)
    : impl_(std::make_unique<Impl>()) {
  options.check();
  const std::int64_t engine_seed = engine.runtime().config().get_int("seed");
  TESSERA_CHECK(static_cast<std::int64_t>(seed) == engine_seed, ConfigError, "a GPT with seed ",
                seed, " on an engine with seed ", engine_seed,
                ": the engine makes the initial values; ", "give both the same seed");
  impl_->options = options;
  const auto make_unit = [&](const std::string& name, const std::string& prefix, auto module,
                             bool recompute) {
    UnitOptions unit_options;
    unit_options.recompute = recompute;
    unit_options.param_prefix = prefix;
    unit_options.init = [&options, &weights, prefix](const std::string& param) {
      return first_values(options, weights, prefix + param);
    };
    return engine.unit(name, std::move(module), unit_options);
  };
  impl_->build(engine.runtime().on_cuda() ? at::kCUDA : at::kCPU, make_unit);
  if (options.tie_head) {
    engine.add_external(impl_->head, impl_->embedding->token_weight());
  }
}

Gpt::Gpt(const GptOptions& options, at::Device device, std::uint64_t seed,
         std::shared_ptr<const GptSource> weights, const shard::StoredRule& stored)
    : impl_(std::make_unique<Impl>()) {
  options.check();
  impl_->options = options;
  const auto make_unit = [&](const std::string& /*name*/, const std::string& prefix, auto module,
                             bool recompute) {
    for (const auto& item : module->named_parameters()) {
      const std::string name = prefix + item.key();
      fill_plain(first_values(options, weights, name), seed, name, stored, options.dtype,
                 item.value());
    }
    return Unit(std::move(module), recompute);
  };
  impl_->build(device, make_unit);
}

Gpt::~Gpt() = default;

at::Tensor Gpt::loss(const at::Tensor& ids, const at::Tensor& targets) {
  TESSERA_CHECK(
      ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.sizes() == targets.sizes() &&
          targets.scalar_type() == at::kLong,
      ConfigError, "a GPT takes ids and targets as two int64 tensors [batch, sequence], not ",
      ids.scalar_type(), " ", ids.sizes(), " and ", targets.scalar_type(), " ", targets.sizes());
  TESSERA_CHECK(ids.size(1) <= impl_->options.sequence, ConfigError, "a sequence of ", ids.size(1),
                " tokens: the model has positions for ", impl_->options.sequence,
                "; give shorter sequences or a larger --seq");
  at::Tensor x = impl_->embedding(ids);
  for (const Unit<BlockImpl>& block : impl_->blocks) {
    x = block(x);
  }
  return impl_->head(x, targets);
}

at::Tensor Gpt::next_logits(const at::Tensor& ids, KeyValueCache* cache) {
  const GptOptions& options = impl_->options;
  TESSERA_CHECK(impl_->embedding.core() == nullptr, ConfigError,
                "next_logits() of a sharded GPT; make a plain one, from a checkpoint of it");
  TESSERA_CHECK(ids.dim() == 2 && ids.numel() > 0 && ids.scalar_type() == at::kLong, ConfigError,
                "a GPT takes ids as an int64 tensor [batch, length], not ", ids.scalar_type(), " ",
                ids.sizes());
  const std::int64_t num_past = cache == nullptr ? 0 : cache->num_tokens;
  const std::int64_t total = num_past + ids.size(1);
  TESSERA_CHECK(total <= options.sequence, ConfigError, total,
                " tokens: the model has positions for ", options.sequence,
                "; begin anew with the last of them");
  const at::NoGradGuard no_grad;
  at::Tensor x = impl_->embedding->embed(ids, num_past);
  if (cache == nullptr) {
    for (const Unit<BlockImpl>& block : impl_->blocks) {
      x = block->forward(x);
    }
  } else {
    if (num_past == 0) {
      cache->blocks.assign(impl_->blocks.size(), {});
      for (KeyValues& block : cache->blocks) {
        block.keys =
            at::empty({ids.size(0), options.heads, options.sequence, options.width / options.heads},
                      x.options());
        block.values = at::empty_like(block.keys);
      }
    }
    for (std::size_t i = 0; i < impl_->blocks.size(); ++i) {
      x = impl_->blocks[i]->extend(x, cache->blocks[i], num_past);
    }
    cache->num_tokens = total;
  }
  return impl_->head->logits(x.narrow(1, ids.size(1) - 1, 1)).squeeze(1);
}

const GptOptions& Gpt::options() const { return impl_->options; }

const std::vector<NamedParam>& Gpt::params() const { return impl_->params; }

Init gpt_init(const GptOptions& options, const std::string& name) {
  // "up.weight" of "blocks.3.up.weight".
  const std::string_view full = name;
  constexpr std::string_view kBlocks = "blocks.";
  const std::string_view inner =
      full.starts_with(kBlocks) ? full.substr(full.find('.', kBlocks.size()) + 1) : full;
  if (inner.starts_with("norm")) {
    return Init::constant(inner.ends_with(".bias") ? 0 : 1);
  }
  const bool is_head = inner == "head.weight" || (options.tie_head && inner == "tokens.weight");
  if (!is_head && (inner == "tokens.weight" || inner == "positions.weight")) {
    return Init::normal(1);
  }
  TESSERA_INVARIANT(inner.starts_with("attention.") || inner.starts_with("up.") ||
                        inner.starts_with("down.") || is_head,
                    name, " is not a parameter of this model");
  if (inner.ends_with(kAdapterB)) {
    return Init::constant(0);
  }
  const std::int64_t inputs = inner.starts_with("down.") ? 4 * options.width : options.width;
  return Init::uniform(1.0 / std::sqrt(static_cast<double>(inputs)));
}

shard::ElementRange gpt_noise_elements(const GptOptions& options, const std::string& name) {
  const bool found = std::string_view(name).ends_with(".attention.qkv.bias");
  return found ? shard::ElementRange{options.width, options.width} : shard::ElementRange{};
}

}  // namespace tessera::models
