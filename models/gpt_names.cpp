#include "models/gpt_names.h"

#include <algorithm>
#include <array>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr std::string_view kBlocks = "blocks.";
constexpr std::string_view kPeftPrefix = "base_model.model.";

struct Module {
  std::string_view ours;
  std::string_view gpt2;
  bool is_linear = false;
};

constexpr std::array kOfBlock = {
    Module{"norm1", "ln_1"},
    Module{"attention.qkv", "attn.c_attn", true},
    Module{"attention.out", "attn.c_proj", true},
    Module{"norm2", "ln_2"},
    Module{"up", "mlp.c_fc", true},
    Module{"down", "mlp.c_proj", true},
};
constexpr std::array kOutside = {
    Module{"tokens", "wte"},
    Module{"positions", "wpe"},
    Module{"norm", "ln_f"},
};

template <typename Modules>
const Module& find_module(const Modules& modules, std::string_view ours, const std::string& param) {
  const auto* found = std::find_if(modules.begin(), modules.end(),
                                   [&](const Module& module) { return module.ours == ours; });
  TESSERA_INVARIANT(found != modules.end(), param, " is not a parameter of a GPT");
  return *found;
}

}  // namespace

FileTensor file_tensor(GptNaming naming, const std::string& prefix, const std::string& param,
                       const std::vector<std::int64_t>& sizes) {
  if (naming == GptNaming::kTessera) {
    return {param, false, sizes};
  }
  if (param == "head.weight") {
    return {"lm_head.weight", false, sizes};
  }
  // "blocks.3." "up" ".weight"
  const std::string_view full = param;
  const bool in_block = full.starts_with(kBlocks);
  const std::size_t begin = in_block ? full.find('.', kBlocks.size()) + 1 : 0;
  const std::size_t end = full.rfind('.');
  TESSERA_INVARIANT(begin < end && end != full.npos, param, " is not a parameter of a GPT");
  const std::string_view ours = full.substr(begin, end - begin);
  const Module& module =
      in_block ? find_module(kOfBlock, ours, param) : find_module(kOutside, ours, param);

  const bool is_of_adapter = is_adapter(param);
  FileTensor tensor;
  tensor.name.append(is_of_adapter ? kPeftPrefix : "").append(prefix);
  if (in_block) {
    tensor.name.append("h.").append(full.substr(kBlocks.size(), begin - kBlocks.size()));
  }
  tensor.name.append(module.gpt2);
  tensor.sizes = sizes;
  if (is_of_adapter) {  // PEFT has them as we do, for all kinds of layers
    tensor.name.append(full.ends_with(kAdapterA) ? ".lora_A.weight" : ".lora_B.weight");
    return tensor;
  }
  tensor.name.append(full.substr(end));
  tensor.is_transposed = module.is_linear && sizes.size() == 2;
  if (tensor.is_transposed) {
    std::reverse(tensor.sizes.begin(), tensor.sizes.end());
  }
  return tensor;
}

bool is_adapter(std::string_view param) {
  return param.ends_with(kAdapterA) || param.ends_with(kAdapterB);
}

bool is_tanh_gelu(std::string_view activation, std::string_view model_type) {
  return activation == "gelu_new" || activation == "gelu_pytorch_tanh" ||
         activation == "gelu_fast" || (activation.empty() && model_type == "gpt2");
}

bool is_gpt2_mask(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

}  // namespace tessera::models
