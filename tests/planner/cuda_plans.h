// Options and questions that tests of plans for CUDA share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tests/planner/small_models.h"

namespace tessera::planner {

inline PlacementOptions on_cuda(Wish parameters = Wish::kAuto, Wish optimizer = Wish::kAuto,
                                bool has_nvme = false) {
  PlacementOptions options;
  options.on_cuda = true;
  options.parameters = parameters;
  options.optimizer = optimizer;
  options.has_nvme = has_nvme;
  options.parameters_host_bytes = 0;
  return options;
}

// Matrices are large, everything else is small.
inline ModelShapes large_gpt(DType dtype = DType::kBFloat16) {
  return small_gpt(512, 3, 4000, dtype);
}

inline bool is_small(const ModelShapes& model, std::size_t id) {
  return model.params[id].numel * static_cast<std::int64_t>(bytes_of(model.dtype)) <=
         kSmallParamBytes;
}

inline std::string refusal_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::planner
