// The GPT that a checkpoint of tessera train holds: which model it is (gpt_description.h), and its
// parameters' values.
//
// Threads: const methods from any thread; reads take turns.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "models/gpt.h"
#include "tessera/checkpoint/checkpoint_reader.h"

namespace tessera::models {

// In Manifest::user: the sources of the run's data, one per line, as --data had them.
inline constexpr const char* kDataSources = "data.sources";

class GptCheckpoint final : public GptSource {
 public:
  // A save, or a directory of saves: then its newest. ConfigError if it describes no GPT of ours,
  // or its parameters are not those that it describes.
  explicit GptCheckpoint(const std::string& path);

  const GptOptions& options() const { return options_; }
  const checkpoint::Manifest& manifest() const { return reader_.manifest(); }
  const std::string& path() const { return reader_.path(); }

  // What elements of type `wanted` are best made of: the values that the run computed with where
  // they are of that type, else its fp32 master weights where it had any.
  const checkpoint::StoredTensor& stored(const std::string& param, DType wanted) const;
  // In order, in pieces that are valid during the call.
  void visit(const checkpoint::StoredTensor& tensor, shard::ElementRange range,
             const checkpoint::CheckpointReader::Visit& visit) const;
  bool has(const std::string& param) const override { return manifest().find(param) != nullptr; }
  void read(const std::string& name, shard::ElementRange range, DType dtype,
            std::byte* out) const override;

 private:
  void check_params() const;

  const checkpoint::CheckpointReader reader_;
  const GptOptions options_;
  mutable std::mutex mutex_;
};

}  // namespace tessera::models
