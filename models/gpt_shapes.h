// The units and parameters of a GPT in numbers: names, sizes, and who uses what, without a tensor.
// For those who plan a model that they could not hold.
//
// Order and names are those in which Gpt registers them; a test compares the two.
//
// No torch header here: whoever only counts need not load one.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/planner/memory_plan.h"

namespace tessera::models {

struct GptOptions;

struct ParamShape {
  std::string name;
  std::vector<std::int64_t> sizes;
  bool trainable = true;
  std::int64_t numel() const;
};

struct UnitShape {
  std::string name;
  // Places in ModelShape::params, ascending: made with the unit, and those of other units.
  std::vector<int> own;
  std::vector<int> external;
  bool has_backward = true;  // not where nothing up to its end is trained
};

struct ModelShape {
  DType dtype = DType::kFloat32;
  std::vector<ParamShape> params;
  std::vector<UnitShape> units;  // in the order of forward
};

// Throws ConfigError as options.check() does.
ModelShape gpt_shape(const GptOptions& options);

// The same for the planner of memory, and for EngineOptions::shapes.
planner::ModelShapes planner_shapes(const ModelShape& model);

}  // namespace tessera::models
