#include "models/gpt_shapes.h"

#include <algorithm>
#include <utility>

#include "models/gpt.h"

namespace tessera::models {
namespace {

class ShapeBuilder {
 public:
  explicit ShapeBuilder(ModelShape& shape) : shape_(shape) {}

  // Parameters from here on belong to it.
  void begin_unit(std::string name, std::string prefix, bool trainable) {
    shape_.units.push_back({std::move(name), {}, {}});
    prefix_ = std::move(prefix);
    trainable_ = trainable;
  }
  void add_linear(const std::string& name, std::int64_t in, std::int64_t out) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  }
  void add_norm(const std::string& name, std::int64_t width) {
    add(name + ".weight", {width});
    add(name + ".bias", {width});
  }
  void add_matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(name + ".weight", {rows, columns});
  }

 private:
  void add(const std::string& name, std::vector<std::int64_t> sizes) {
    shape_.units.back().own.push_back(static_cast<int>(shape_.params.size()));
    shape_.params.push_back({prefix_ + name, std::move(sizes), trainable_});
  }

  ModelShape& shape_;
  std::string prefix_;
  bool trainable_ = true;
};

}  // namespace

std::int64_t ParamShape::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    product *= size;
  }
  return product;
}

ModelShape gpt_shape(const GptOptions& options) {
  options.check();
  const std::int64_t width = options.width;
  ModelShape shape;
  shape.dtype = options.dtype;
  ShapeBuilder builder(shape);
  builder.begin_unit("embedding", "", true);
  builder.add_matrix("tokens", options.vocabulary, width);
  builder.add_matrix("positions", options.sequence, width);
  for (std::int64_t index = 0; index < options.layers; ++index) {
    const std::string name = "blocks." + std::to_string(index);
    builder.begin_unit(name, name + ".", index >= options.freeze);
    builder.add_norm("norm1", width);
    builder.add_linear("attention.qkv", width, 3 * width);
    builder.add_linear("attention.out", width, width);
    builder.add_norm("norm2", width);
    builder.add_linear("up", width, 4 * width);
    builder.add_linear("down", 4 * width, width);
  }
  builder.begin_unit("head", "", true);
  builder.add_norm("norm", width);
  if (options.tie_head) {
    shape.units.back().external.push_back(shape.units.front().own.front());
  } else {
    builder.add_matrix("head", options.vocabulary, width);
  }
  return shape;
}

planner::ModelShapes planner_shapes(const ModelShape& model) {
  planner::ModelShapes shapes;
  shapes.dtype = model.dtype;
  for (const ParamShape& param : model.params) {
    planner::ParamShape& shape = shapes.params.emplace_back();
    shape.name = param.name;
    shape.numel = param.numel();
    shape.trainable = param.trainable;
    shape.num_dims = static_cast<int>(param.sizes.size());
  }
  for (const UnitShape& unit : model.units) {
    std::vector<int> ids = unit.own;
    ids.insert(ids.end(), unit.external.begin(), unit.external.end());
    std::sort(ids.begin(), ids.end());
    shapes.units.push_back(std::move(ids));
    shapes.unit_names.push_back(unit.name);
  }
  return shapes;
}

}  // namespace tessera::models
