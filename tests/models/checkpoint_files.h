// A save of a GPT as so many ranks would write it, for tests of what reads one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "models/gpt.h"
#include "models/gpt_checkpoint.h"
#include "models/gpt_description.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/save_directory.h"
#include "tests/models/weight_files.h"

namespace tessera::models {

struct CheckpointFileOptions {
  int num_ranks = 1;
  std::int64_t step = 7;
  // The run's; with another than fp32 the parameters are its master weights.
  DType dtype = DType::kFloat32;
  std::string sources = "demo";
};

// What a test may change before the save is complete.
using ChangeManifest = std::function<void(checkpoint::Manifest& manifest)>;

// The size of a safetensors header, after which the first tensor lies.
inline std::uint64_t header_bytes(const std::filesystem::path& path) {
  std::array<unsigned char, 8> field{};
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(field.data()), 8);
  std::uint64_t length = 0;
  for (std::size_t i = field.size(); i-- > 0;) {
    length = length << 8 | field[i];
  }
  return field.size() + length;
}

// Returns the save's path.
inline std::string write_gpt_checkpoint(const std::filesystem::path& root, const Gpt& gpt,
                                        const CheckpointFileOptions& options = {},
                                        const ChangeManifest& change = {}) {
  checkpoint::NewSave save(root.string(), options.step, {});
  checkpoint::Manifest manifest;
  manifest.step = options.step;
  manifest.sequence = save.sequence();
  manifest.num_ranks = options.num_ranks;
  GptOptions model = gpt.options();
  model.dtype = options.dtype;
  manifest.user = describe(model);
  manifest.user[kDataSources] = options.sources;

  std::vector<std::pair<WeightTensor, checkpoint::StoredTensor*>> tensors;
  manifest.params.resize(gpt.params().size());
  for (std::size_t i = 0; i < gpt.params().size(); ++i) {
    const NamedParam& param = gpt.params()[i];
    checkpoint::StoredParam& stored = manifest.params[i];
    stored.name = param.name;
    stored.shape = param.tensor.sizes().vec();
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      checkpoint::StoredTensor& into = stored.tensors[name];
      tensors.emplace_back(weight_tensor(name + "." + param.name, tensor), &into);
      into.dtype = tensors.back().first.dtype;
      checkpoint::ContentHash content;
      content.add(tensors.back().first.bytes);
      into.content = content.value();
    };
    add("value", param.tensor.detach().to(shard::scalar_type_of(options.dtype)));
    if (options.dtype != DType::kFloat32) {
      add("master", param.tensor);
    }
  }
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const std::string name = "rank-" + std::to_string(rank) + ".safetensors";
    const std::filesystem::path path = std::filesystem::path(save.path()) / name;
    std::vector<WeightTensor> pieces;
    for (auto& [tensor, stored] : tensors) {
      const auto size = static_cast<std::int64_t>(bytes_of(tensor.dtype));
      const std::int64_t numel = static_cast<std::int64_t>(tensor.bytes.size()) / size;
      const std::int64_t begin = numel * rank / options.num_ranks;
      const std::int64_t end = numel * (rank + 1) / options.num_ranks;
      if (begin == end) {
        continue;
      }
      pieces.push_back({tensor.name,
                        tensor.dtype,
                        {end - begin},
                        {tensor.bytes.begin() + begin * size, tensor.bytes.begin() + end * size}});
      checkpoint::Fragment fragment;
      fragment.file = rank;
      fragment.begin = begin;
      fragment.numel = end - begin;
      fragment.xxh3 = checkpoint::xxh3(pieces.back().bytes);
      stored->fragments.push_back(fragment);
    }
    write_weights(path, pieces);
    std::uint64_t offset = header_bytes(path);
    std::size_t next = 0;
    for (auto& [tensor, stored] : tensors) {
      if (!stored->fragments.empty() && stored->fragments.back().file == rank) {
        stored->fragments.back().offset = offset;
        offset += pieces[next++].bytes.size();
      }
    }
    manifest.files.push_back({name, std::filesystem::file_size(path)});
  }
  if (change) {
    change(manifest);
  }
  return save.commit(manifest);
}

}  // namespace tessera::models
