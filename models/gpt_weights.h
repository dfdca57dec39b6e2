// Initial weights of a GPT from files of other runs and programs: a safetensors set
// (safetensors_set.h) in our names or in GPT-2's (gpt_names.h), in fp32, bf16 or fp16.
//
// Names, shapes and types of all tensors are compared with the model when it is opened; values are
// read when they are asked for, each rank's own alone. A config.json beside the files is held
// against what shapes cannot say: number of heads, activation, epsilon. Without one the options are
// believed.
//
// A set need not have the model's adapters: they then start as those of a base do. In our names it
// may have them, all or none.
//
// Threads: const methods from any thread.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "models/gpt.h"
#include "models/gpt_names.h"
#include "models/safetensors_set.h"

namespace tessera::models {

class InitialWeights final : public GptSource {
 public:
  // See open_weights().
  InitialWeights(const std::string& path, const GptOptions& options);

  // For people: "GPT-2's names, 3 files".
  const std::string& summary() const { return summary_; }
  bool has(const std::string& param) const override { return places_.contains(param); }
  void read(const std::string& name, shard::ElementRange range, DType dtype,
            std::byte* out) const override;

 private:
  struct Place {
    FileTensor tensor;
    DType dtype = DType::kFloat32;
  };

  void find_params(const GptOptions& options, GptNaming naming, const std::string& prefix);
  void check_tied_head(const std::string& tokens, const std::string& head) const;
  void read_transposed(const Place& place, shard::ElementRange range, DType dtype,
                       std::byte* out) const;

  SafetensorsSet set_;
  std::map<std::string, Place> places_;  // by our name of the parameter
  std::string summary_;
};

// A directory, an index, or one file. Throws ConfigError with all tensors that are missing, of
// another shape or type, or that the model has not, and with what of config.json our GPT does not
// compute; CorruptError and IoError as the files give reason.
std::shared_ptr<const InitialWeights> open_weights(const std::string& path,
                                                   const GptOptions& options);

}  // namespace tessera::models
