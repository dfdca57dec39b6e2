#include "models/gpt_adapters.h"

#include <algorithm>
#include <string_view>

#include "models/element_convert.h"
#include "models/gpt_checkpoint.h"
#include "models/gpt_names.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr std::string_view kWeight = "weight";

// "blocks.3.up." of "blocks.3.up.weight"; empty: no weight.
std::string layer_of(const std::string& weight) {
  return weight.ends_with(kWeight) ? weight.substr(0, weight.size() - kWeight.size()) : "";
}

}  // namespace

bool has_adapter(const GptCheckpoint& checkpoint, const std::string& weight) {
  const std::string layer = layer_of(weight);
  return checkpoint.options().adapter_rank > 0 && !layer.empty() &&
         checkpoint.has(layer + kAdapterA);
}

AdapterProduct::AdapterProduct(const GptCheckpoint& checkpoint, const std::string& weight,
                               DType wanted)
    : rank_(static_cast<std::size_t>(checkpoint.options().adapter_rank)),
      scale_(static_cast<float>(checkpoint.options().adapter_scale())) {
  const auto read = [&](const std::string& name) {
    const checkpoint::StoredTensor& stored = checkpoint.stored(name, wanted);
    std::int64_t numel = 1;
    for (const std::int64_t size : checkpoint.manifest().find(name)->shape) {
      numel *= size;
    }
    std::vector<float> values(static_cast<std::size_t>(numel));
    checkpoint.visit(stored, {0, numel}, [&](std::int64_t begin, std::span<const std::byte> bytes) {
      convert_elements(stored.dtype, bytes, DType::kFloat32,
                       reinterpret_cast<std::byte*>(values.data() + begin));
    });
    return values;
  };
  const std::string layer = layer_of(weight);
  a_ = read(layer + kAdapterA);
  b_ = read(layer + kAdapterB);
  inputs_ = a_.size() / rank_;
  row_.resize(inputs_);
}

void AdapterProduct::add_to(std::int64_t begin, std::span<float> values) {
  auto row = static_cast<std::size_t>(begin) / inputs_;
  auto column = static_cast<std::size_t>(begin) % inputs_;
  for (std::size_t done = 0; done < values.size(); ++row, column = 0) {
    const std::size_t count = std::min(inputs_ - column, values.size() - done);
    std::fill_n(row_.begin(), count, 0.0F);
    for (std::size_t r = 0; r < rank_; ++r) {
      const float factor = b_[row * rank_ + r];
      const float* const from = a_.data() + r * inputs_ + column;
      for (std::size_t i = 0; i < count; ++i) {
        row_[i] += factor * from[i];
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      values[done + i] += scale_ * row_[i];
    }
    done += count;
  }
}

}  // namespace tessera::models
