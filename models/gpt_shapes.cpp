#include "models/gpt_shapes.h"

#include <algorithm>
#include <utility>

#include "models/gpt.h"
#include "models/gpt_names.h"

namespace tessera::models {
namespace {

class ShapeBuilder {
 public:
  explicit ShapeBuilder(ModelShape& shape) : shape_(shape) {}

  // Parameters from here on belong to it.
  void begin_unit(std::string name, std::string prefix, bool trainable) {
    shape_.units.push_back({std::move(name), {}, {}, true});
    prefix_ = std::move(prefix);
    trainable_ = trainable;
  }
  // `rank`: of its adapter; 0: none.
  void add_linear(const std::string& name, std::int64_t in, std::int64_t out, std::int64_t rank,
                  bool trains_adapter) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
    if (rank > 0) {
      add(name + "." + kAdapterA, {rank, in}, trains_adapter);
      add(name + "." + kAdapterB, {out, rank}, trains_adapter);
    }
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
    add(name, std::move(sizes), trainable_);
  }
  void add(const std::string& name, std::vector<std::int64_t> sizes, bool trainable) {
    shape_.units.back().own.push_back(static_cast<int>(shape_.params.size()));
    shape_.params.push_back({prefix_ + name, std::move(sizes), trainable});
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
  builder.begin_unit("embedding", "", options.trains_base());
  builder.add_matrix("tokens", options.vocabulary, width);
  builder.add_matrix("positions", options.sequence, width);
  for (std::int64_t index = 0; index < options.layers; ++index) {
    const std::string name = "blocks." + std::to_string(index);
    builder.begin_unit(name, name + ".", options.trains_base(index));
    const auto add_linear = [&](const char* layer, std::int64_t in, std::int64_t out) {
      builder.add_linear(layer, in, out, options.adapter_rank, options.trains_adapters(index));
    };
    builder.add_norm("norm1", width);
    add_linear("attention.qkv", width, 3 * width);
    add_linear("attention.out", width, width);
    builder.add_norm("norm2", width);
    add_linear("up", width, 4 * width);
    add_linear("down", 4 * width, width);
  }
  builder.begin_unit("head", "", options.trains_base());
  builder.add_norm("norm", width);
  if (options.tie_head) {
    shape.units.back().external.push_back(shape.units.front().own.front());
  } else {
    builder.add_matrix("head", options.vocabulary, width);
  }
  if (options.freeze_base) {
    for (std::int64_t unit = 0; unit < 1 + options.num_without_backward(); ++unit) {
      shape.units[static_cast<std::size_t>(unit)].has_backward = false;
    }
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
