// Models in numbers, and the options and questions that tests of the planner share.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/memory_planner.h"

namespace tessera::planner {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;
inline constexpr std::int64_t kGiB = std::int64_t{1} << 30;

inline MemoryPlan planned(const ModelShapes& model, const MemoryPlanOptions& options,
                          std::int64_t num_micro_batches = 1) {
  return plan_memory(model, options, num_micro_batches);
}

class ModelMaker {
 public:
  explicit ModelMaker(DType dtype = DType::kFloat32) { model_.dtype = dtype; }

  ModelMaker& unit(const std::string& name, const std::vector<std::int64_t>& numels,
                   bool trainable = true) {
    model_.unit_names.push_back(name);
    model_.units.emplace_back();
    for (const std::int64_t numel : numels) {
      model_.units.back().push_back(static_cast<int>(model_.params.size()));
      model_.params.push_back(
          {name + "." + std::to_string(model_.units.back().size()), numel, trainable, false});
    }
    return *this;
  }
  ModelShapes make() const { return model_; }

 private:
  ModelShapes model_;
};

inline ModelShapes equal_units(int count, const std::vector<std::int64_t>& numels,
                               DType dtype = DType::kFloat32) {
  ModelMaker maker(dtype);
  for (int i = 0; i < count; ++i) {
    maker.unit("u" + std::to_string(i), numels);
  }
  return maker.make();
}

// A transformer of `width`: a large table first and last, small biases between matrices.
inline ModelShapes small_gpt(std::int64_t width, int layers, std::int64_t vocabulary,
                             DType dtype = DType::kFloat32) {
  ModelMaker maker(dtype);
  maker.unit("embedding", {vocabulary * width, 64 * width});
  for (int i = 0; i < layers; ++i) {
    maker.unit("blocks." + std::to_string(i),
               {width, width, 3 * width * width, 3 * width, width * width, width, width, width,
                4 * width * width, 4 * width, 4 * width * width, width});
  }
  maker.unit("head", {width, width, vocabulary * width});
  return maker.make();
}

// Matrices are large, everything else is small.
inline ModelShapes large_gpt(DType dtype = DType::kBFloat16) {
  return small_gpt(512, 3, 4000, dtype);
}

inline std::vector<ModelShapes> small_models() {
  ModelMaker odd;
  odd.unit("odd", {1, 15, 4096, 5000, 100003});
  odd.unit("frozen", {70001, 3}, false);
  odd.unit("empty", {0});
  odd.unit("long", {700001, 2048});
  ModelMaker tied;
  tied.unit("a", {30000, 64}).unit("b", {200000});
  ModelShapes tied_model = tied.make();
  tied_model.units.back().insert(tied_model.units.back().begin(), 0);
  return {odd.make(), tied_model, small_gpt(48, 3, 1000), small_gpt(64, 2, 3000, DType::kBFloat16),
          ModelMaker(DType::kFloat16).unit("one", {1}).make()};
}

// A CPU: NVMe is there, and `bytes` of memory.
inline MemoryPlanOptions with_budget(std::int64_t bytes, int num_ranks = 1) {
  MemoryPlanOptions options;
  options.num_ranks = num_ranks;
  options.has_nvme = true;
  options.host_bytes = bytes;
  return options;
}

inline MemoryPlanOptions on_gpu(std::optional<Tier> parameters = {},
                                std::optional<Tier> optimizer = {}, bool has_nvme = false) {
  MemoryPlanOptions options;
  options.is_discrete = true;
  options.parameters = parameters;
  options.optimizer = optimizer;
  options.has_nvme = has_nvme;
  options.parameters_host_bytes = 0;
  return options;
}

inline MemoryPlanOptions in_host() { return on_gpu(Tier::kHost, Tier::kHost); }

inline bool is_small(const ModelShapes& model, std::size_t id) {
  return model.params[id].numel * static_cast<std::int64_t>(bytes_of(model.dtype)) <=
         kSmallParamBytes;
}

inline bool device_updates(const Placement& placement) {
  return placement.updater == Updater::kDevice;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// "": it is possible.
inline std::string refusal_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}
inline std::string refusal_of(const ModelShapes& model, const MemoryPlanOptions& options) {
  return refusal_of([&] { planned(model, options); });
}

// What a refusal says a budget must at least be.
inline std::int64_t advised_bytes(const std::string& refusal) {
  const std::string before = "to at least ";
  const std::size_t begin = refusal.find(before) + before.size();
  return parse_bytes(refusal.substr(begin, refusal.find_first_of(", ", begin) - begin)).value();
}

}  // namespace tessera::planner
