// A checkpoint's GPT as a safetensors set that other programs read (safetensors_set.h), with a
// config.json in the style of Hugging Face.
//
// The target is a new directory: it is written beside its place and renamed, so that it is there
// whole or not at all. Tensors pass through in tiles: memory does not grow with the model, but for
// one buffer of at most kExportTileBytes in which a band of a transposed tensor is turned.
//
// With GPT-2's names the set is one of `transformers`' GPT2LMHeadModel, which computes the same
// logits; with ours it is one that tessera train --init reads as it is.
//
// Adapters are merged into the weights beside them (gpt_adapters.h), layer by layer; or they alone
// are written, as PEFT has them: adapter_model.safetensors and adapter_config.json, to be loaded
// beside the base in GPT-2's names.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "models/gpt_names.h"
#include "tessera/core/dtype.h"

namespace tessera::models {

struct GptOptions;

inline constexpr std::size_t kExportTileBytes = std::size_t{128} << 20;
inline constexpr std::uint64_t kExportShardBytes = 5'000'000'000;  // as `transformers` has it

enum class ExportAdapters : std::uint8_t { kMerged, kAlone };

struct ExportOptions {
  std::string checkpoint;  // a save, or a directory of saves: then its newest
  std::string to;
  GptNaming naming = GptNaming::kGpt2;
  // kAlone: with GPT-2's names only.
  ExportAdapters adapters = ExportAdapters::kMerged;
  std::optional<DType> dtype;  // none: the run's
  // A file holds no more of tensors, unless a single one is larger.
  std::uint64_t shard_bytes = kExportShardBytes;
  // Of a transposed tensor at a time, at least one row of the file's.
  std::size_t tile_bytes = kExportTileBytes;
};

struct ExportResult {
  std::string save;  // that was exported
  std::int64_t step = 0;
  DType dtype = DType::kFloat32;
  int num_tensors = 0;
  int num_files = 0;  // of tensors
  std::uint64_t bytes = 0;
  int num_merged = 0;  // tensors that an adapter was merged into
};

// ConfigError if adapters are wanted of a model that has none, something has the target's name,
// or a value is beyond fp16; IoError if the disk has no room, before anything is written where that
// is known.
ExportResult export_weights(const ExportOptions& options);

// The text of config.json.
std::string export_config(const GptOptions& options, GptNaming naming, DType dtype);
// Of adapter_config.json.
std::string adapter_config(const GptOptions& options);

}  // namespace tessera::models
