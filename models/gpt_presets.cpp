// What a GPT is made of, in numbers: presets, checks and sizes. No tensors here.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "models/gpt.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

struct Preset {
  std::string_view name;
  std::int64_t width;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t vocabulary;
  std::int64_t sequence;
};

constexpr std::array kPresets = {
    Preset{"micro", 32, 2, 2, 64, 16},
    Preset{"tiny", 128, 2, 2, 256, 64},
    Preset{"small", 256, 4, 4, 4096, 128},
    Preset{"gpt2-124m", 768, 12, 12, 50304, 1024},
    Preset{"gpt-1b4", 2048, 24, 16, 50304, 1024},
    Preset{"gpt-7b", 4096, 32, 32, 50304, 1024},
    Preset{"gpt-13b", 5120, 40, 40, 50304, 1024},
};

constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;

void check_range(std::string_view what, std::int64_t value, std::int64_t max) {
  TESSERA_CHECK(value >= 1 && value <= max, ConfigError, what, " ", value, " is not from 1 to ",
                max);
}

std::int64_t nearest_divisor(std::int64_t number, std::int64_t wanted) {
  for (std::int64_t apart = 1;; ++apart) {
    for (const std::int64_t divisor : {wanted - apart, wanted + apart}) {
      if (divisor >= 1 && divisor <= number && number % divisor == 0) {
        return divisor;
      }
    }
  }
}

}  // namespace

void GptOptions::check() const {
  check_range("--width", width, kMaxGptWidth);
  check_range("--layers", layers, kMaxGptLayers);
  check_range("--heads", heads, kMaxGptWidth);
  check_range("--vocab", vocabulary, kMaxRows);
  check_range("--seq", sequence, kMaxRows);
  TESSERA_CHECK(width % heads == 0, ConfigError, "--heads ", heads, " does not divide --width ",
                width, "; the nearest that does is ", nearest_divisor(width, heads));
  TESSERA_CHECK(freeze >= 0 && freeze <= layers, ConfigError, "--freeze ", freeze,
                " is not from 0 to ", layers, ", the number of blocks");
  TESSERA_CHECK(adapter_rank >= 0 && adapter_rank <= width, ConfigError, "--adapters ",
                adapter_rank, " is not from 0 (none) to ", width,
                ", the width: more is no low rank");
  TESSERA_CHECK(adapter_rank == 0 || (std::isfinite(adapter_alpha) && adapter_alpha > 0),
                ConfigError, "--adapter-alpha ", adapter_alpha, " is not a number above 0");
  TESSERA_CHECK(!freeze_base || adapter_rank > 0, ConfigError,
                "--freeze-base without --adapters: nothing would be trained; give --adapters R, or "
                "leave --freeze-base out");
  TESSERA_CHECK(!freeze_base || freeze < layers, ConfigError, "--freeze ", freeze,
                " with a frozen base: nothing would be trained, adapters of frozen blocks are "
                "frozen, too; give a number below ",
                layers);
  TESSERA_CHECK(loss_chunk >= 0 && loss_chunk <= kMaxRows, ConfigError, "--loss-chunk ", loss_chunk,
                " is not from 0 (all at once) to ", kMaxRows);
  TESSERA_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
                ConfigError, "--precision ", to_string(dtype), " is none of fp32, bf16, fp16");
}

GptOptions gpt_preset(std::string_view name) {
  const auto* found = std::find_if(kPresets.begin(), kPresets.end(),
                                   [&](const Preset& preset) { return preset.name == name; });
  if (found == kPresets.end()) {
    std::string names;
    for (const Preset& preset : kPresets) {
      names.append(names.empty() ? "" : ", ").append(preset.name);
    }
    throw ConfigError(detail::concat("--preset ", name, " is none of ", names));
  }
  GptOptions options;
  options.width = found->width;
  options.layers = found->layers;
  options.heads = found->heads;
  options.vocabulary = found->vocabulary;
  options.sequence = found->sequence;
  return options;
}

std::vector<std::string_view> gpt_preset_names() {
  std::vector<std::string_view> names;
  for (const Preset& preset : kPresets) {
    names.push_back(preset.name);
  }
  return names;
}

GptSize gpt_size(const GptOptions& options) {
  const std::int64_t width = options.width;
  const std::int64_t table = options.vocabulary * width;
  const std::int64_t embedding = table + options.sequence * width;
  // An adapter has its rank times inputs and outputs: of qkv 4 widths, of out 2, of up and down 5.
  const std::int64_t block = 12 * width * width + 13 * width + 16 * options.adapter_rank * width;
  const std::int64_t norm = 2 * width;
  GptSize size;
  size.num_params = embedding + options.layers * block + norm + (options.tie_head ? 0 : table);
  size.largest_unit = std::max({embedding, block, norm + table});
  return size;
}

double gpt_flops_per_token(const GptOptions& options) {
  const auto width = static_cast<double>(options.width);
  const auto num_passive = static_cast<double>(options.num_without_backward());
  const auto num_frozen = static_cast<double>(options.freeze) - num_passive;
  const auto num_trained = static_cast<double>(options.layers - options.freeze);
  const double base = 12 * width * width;
  const double adapters = 16 * static_cast<double>(options.adapter_rank) * width;
  const double head = static_cast<double>(options.vocabulary) * width;
  const double attention = 4 * width * static_cast<double>(options.sequence);  // of a forward
  const double of_base = options.freeze_base ? 4 : 6;
  return num_trained * (of_base * base + 6 * adapters + 3 * attention) +
         num_frozen * (4 * (base + adapters) + 3 * attention) +
         num_passive * (2 * (base + adapters) + attention) + of_base * head;
}

}  // namespace tessera::models
