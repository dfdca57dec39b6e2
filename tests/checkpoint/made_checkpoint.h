// Complete checkpoints of any number of ranks, made of bytes that a test chooses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_directory.h"

namespace tessera::testing {

struct MadeParam {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
};

struct MadeOptions {
  std::vector<MadeParam> params;
  std::int64_t step = 60;
  int num_ranks = 2;
  std::uint64_t seed = 1;  // of the parameters' bytes, whatever the number of ranks
  // Elements per fragment; 0: as ranks share them.
  std::int64_t piece_numel = 0;
};

struct MadeCheckpoint {
  std::string path;
  checkpoint::Manifest manifest;
  std::map<std::string, std::vector<std::byte>> contents;  // "value of NAME", "exp_avg of NAME"
};

inline std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::size_t begin = 0; begin < count; begin += sizeof(std::uint64_t)) {
    const std::uint64_t word = random() & 0x3f3f3f3f3f3f3f3fU;  // no type has a NaN among these
    std::memcpy(&bytes[begin], &word, std::min(sizeof(word), count - begin));
  }
  return bytes;
}

// A save of these parameters, each with its value and a state, a buffer, and a generator's state.
// `changed` may change the contents before they are written.
template <typename Change>
MadeCheckpoint make_checkpoint(const std::filesystem::path& root, const MadeOptions& options,
                               Change changed) {
  using namespace checkpoint;  // in a function
  MadeCheckpoint made;
  NewSave save(root.string(), options.step, {.keep = 99});
  made.manifest.step = options.step;
  made.manifest.sequence = save.sequence();
  made.manifest.num_ranks = options.num_ranks;
  // What each rank's file holds, in order, and where its place is to be written.
  struct Part {
    TensorEntry entry;
    std::span<const std::byte> bytes;
    std::size_t param;
    std::string tensor;
    Fragment fragment;
  };
  std::vector<std::vector<Part>> parts(static_cast<std::size_t>(options.num_ranks));
  std::uint64_t seed = options.seed * 1000;
  for (const MadeParam& param : options.params) {
    StoredParam stored{param.name, {}, param.shape, {}, true, options.step, {}};
    const std::int64_t numel = stored.numel();
    for (const auto& [name, dtype] :
         {std::pair("value", param.dtype), std::pair("exp_avg", DType::kFloat32)}) {
      const std::size_t size = bytes_of(dtype);
      std::vector<std::byte>& bytes = made.contents[name + (" of " + param.name)];
      bytes = random_bytes(static_cast<std::size_t>(numel) * size, ++seed);
      changed(name + (" of " + param.name), bytes);
      ContentHash content;
      content.add(bytes);
      stored.tensors[name] = {dtype, content.value(), {}};
      const std::int64_t piece = options.piece_numel > 0
                                     ? options.piece_numel
                                     : (numel + options.num_ranks - 1) / options.num_ranks;
      for (std::int64_t begin = 0, n = 0; begin < numel; begin += piece, ++n) {
        const std::int64_t count = std::min(piece, numel - begin);
        const auto part = std::span<const std::byte>(bytes).subspan(
            static_cast<std::size_t>(begin) * size, static_cast<std::size_t>(count) * size);
        const auto rank = static_cast<std::size_t>(n % options.num_ranks);
        parts[rank].push_back(
            {{name + (" of " + param.name + " part " + std::to_string(n)), dtype, {count}},
             part,
             made.manifest.params.size(),
             name,
             {static_cast<int>(rank), 0, begin, count, xxh3(part)}});
      }
    }
    made.manifest.params.push_back(std::move(stored));
  }
  StoredRankTensor buffer{"mean", DType::kFloat32, "", {3}, {}};
  StoredRankTensor generator{"cpu", DType::kUInt8, "", {5}, {}};
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    std::vector<TensorEntry> entries = {{"generator", DType::kUInt8, {5}}};
    const auto generator_bytes = random_bytes(5, options.seed + static_cast<unsigned>(rank));
    const auto buffer_bytes = random_bytes(12, options.seed + 50 + static_cast<unsigned>(rank));
    auto& own = parts[static_cast<std::size_t>(rank)];
    for (const Part& part : own) {
      entries.push_back(part.entry);
    }
    entries.push_back({"buffer", DType::kFloat32, {3}});
    const std::string name = "rank-" + std::to_string(rank) + ".safetensors";
    const std::string path = save.path() + "/" + name;
    SafetensorsWriter writer(path, entries);
    writer.append(generator_bytes.data(), generator_bytes.size());  // so nothing else is aligned
    for (const Part& part : own) {
      writer.append(part.bytes.data(), part.bytes.size());
    }
    writer.append(buffer_bytes.data(), buffer_bytes.size());
    writer.finish();
    made.manifest.files.push_back({name, std::filesystem::file_size(path)});
    const SafetensorsReader reader(path);
    generator.ranks.push_back({rank, reader.data_offset(0), 0, 5, xxh3(generator_bytes)});
    for (std::size_t i = 0; i < own.size(); ++i) {
      own[i].fragment.offset = reader.data_offset(i + 1);
      made.manifest.params[own[i].param].tensors[own[i].tensor].fragments.push_back(
          own[i].fragment);
    }
    buffer.ranks.push_back({rank, reader.data_offset(own.size() + 1), 0, 3, xxh3(buffer_bytes)});
  }
  for (StoredParam& param : made.manifest.params) {
    for (auto& [name, tensor] : param.tensors) {
      std::sort(tensor.fragments.begin(), tensor.fragments.end(),
                [](const Fragment& a, const Fragment& b) { return a.begin < b.begin; });
    }
  }
  made.manifest.buffers = {buffer};
  made.manifest.generators = {generator};
  made.path = save.commit(made.manifest);
  return made;
}

inline MadeCheckpoint make_checkpoint(const std::filesystem::path& root,
                                      const MadeOptions& options) {
  return make_checkpoint(root, options, [](const std::string&, std::vector<std::byte>&) {});
}

}  // namespace tessera::testing
