// Files of weights as other programs write them, for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "models/gpt_names.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::models {

// Parameters away from the initial values, where biases are zero and all logits are nearly alike.
inline void scatter(const Gpt& gpt, double deviation) {
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  for (const NamedParam& param : gpt.params()) {
    param.tensor.add_(at::randn(param.tensor.sizes(), generator, at::kFloat), deviation);
  }
}

struct WeightTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

inline WeightTensor weight_tensor(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().to(at::kCPU).contiguous();
  const auto* const data = static_cast<const std::byte*>(dense.const_data_ptr());
  return {name, shard::dtype_of(dense, name), dense.sizes().vec(), {data, data + dense.nbytes()}};
}

// The model's parameters under other names.
inline std::vector<WeightTensor> weights_of(const Gpt& gpt, GptNaming naming,
                                            const std::string& prefix,
                                            DType dtype = DType::kFloat32) {
  std::vector<WeightTensor> weights;
  for (const NamedParam& param : gpt.params()) {
    const FileTensor file = file_tensor(naming, prefix, param.name, param.tensor.sizes().vec());
    const at::Tensor tensor = file.is_transposed ? param.tensor.t() : param.tensor;
    weights.push_back(weight_tensor(file.name, tensor.detach().to(shard::scalar_type_of(dtype))));
  }
  return weights;
}

inline void write_weights(const std::filesystem::path& path,
                          const std::vector<WeightTensor>& weights) {
  std::vector<checkpoint::TensorEntry> entries;
  for (const WeightTensor& weight : weights) {
    entries.push_back({weight.name, weight.dtype, weight.shape});
  }
  checkpoint::SafetensorsWriter writer(path.string(), entries);
  for (const WeightTensor& weight : weights) {
    writer.append(weight.bytes.data(), weight.bytes.size());
  }
  writer.finish();
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// An index by tensor, and its files, each of `per_file` tensors.
inline void write_sharded(const std::filesystem::path& folder,
                          const std::vector<WeightTensor>& weights, std::size_t per_file) {
  std::string map;
  for (std::size_t begin = 0; begin < weights.size(); begin += per_file) {
    const std::size_t end = std::min(begin + per_file, weights.size());
    const std::string file = "part-" + std::to_string(begin / per_file) + ".safetensors";
    write_weights(folder / file, {weights.begin() + static_cast<std::ptrdiff_t>(begin),
                                  weights.begin() + static_cast<std::ptrdiff_t>(end)});
    for (std::size_t i = begin; i < end; ++i) {
      map.append(map.empty() ? "" : ",").append("\"" + weights[i].name + "\":\"" + file + "\"");
    }
  }
  write_text(folder / "model.safetensors.index.json",
             R"({"metadata":{"total_size":1},"weight_map":{)" + map + "}}");
}

}  // namespace tessera::models
