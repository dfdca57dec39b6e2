// The shapes that plans are made from against the model that is trained.
#include "models/gpt_shapes.h"

#include <gtest/gtest.h>

#include "models/gpt.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"

namespace tessera::models {
namespace {

void expect_shape_of_model(const GptOptions& options) {
  Config config;
  config.set("log.level", std::string("error"));
  config.set("seed", std::int64_t{7});
  Runtime runtime(config);
  Engine engine(runtime);
  const Gpt gpt(options, engine, 7);
  const ModelShape shape = gpt_shape(options);

  ASSERT_EQ(static_cast<int>(shape.params.size()), engine.num_params());
  for (int id = 0; id < engine.num_params(); ++id) {
    const ParamShape& param = shape.params[static_cast<std::size_t>(id)];
    EXPECT_EQ(param.name, engine.param(id).name());
    EXPECT_EQ(param.sizes, engine.tensor(id).sizes().vec()) << param.name;
    EXPECT_EQ(param.trainable, engine.param(id).trainable()) << param.name;
    EXPECT_EQ(param.numel(), engine.param(id).layout().numel()) << param.name;
    EXPECT_EQ(shape.dtype, engine.param(id).layout().dtype()) << param.name;
  }
  ASSERT_EQ(shape.units.size(), engine.coordinator().num_units());
  for (std::size_t i = 0; i < shape.units.size(); ++i) {
    const coordinator::UnitInfo& unit =
        engine.coordinator().unit(static_cast<coordinator::UnitId>(i));
    EXPECT_EQ(shape.units[i].name, unit.name);
    EXPECT_EQ(shape.units[i].own, unit.own_ids) << unit.name;
    EXPECT_EQ(shape.units[i].external, unit.external) << unit.name;
  }
}

TEST(GptShape, IsThatOfTheModel) {
  GptOptions options = gpt_preset("tiny");
  expect_shape_of_model(options);
  options.tie_head = true;
  options.freeze = 1;
  options.dtype = DType::kBFloat16;
  options.layers = 3;
  options.vocabulary = 129;
  expect_shape_of_model(options);
  options.adapter_rank = 5;
  options.adapter_alpha = 10;
  expect_shape_of_model(options);
  options.freeze_base = true;
  expect_shape_of_model(options);
}

TEST(GptShape, AddsUpToTheClosedFormsOfEveryPreset) {
  for (const std::string_view preset : gpt_preset_names()) {
    for (const bool tied : {false, true}) {
      GptOptions options = gpt_preset(preset);
      options.tie_head = tied;
      const ModelShape shape = gpt_shape(options);
      std::int64_t all = 0;
      std::int64_t largest_unit = 0;
      for (const UnitShape& unit : shape.units) {
        std::int64_t own = 0;
        for (const int id : unit.own) {
          own += shape.params[static_cast<std::size_t>(id)].numel();
        }
        std::int64_t used = own;
        for (const int id : unit.external) {
          used += shape.params[static_cast<std::size_t>(id)].numel();
        }
        all += own;
        largest_unit = std::max(largest_unit, used);
      }
      EXPECT_EQ(all, gpt_size(options).num_params) << preset;
      EXPECT_EQ(largest_unit, gpt_size(options).largest_unit) << preset;
    }
  }
}

TEST(GptShape, RefusesWhatTheModelRefuses) {
  GptOptions options = gpt_preset("tiny");
  options.layers = 0;
  EXPECT_THROW(gpt_shape(options), ConfigError);
}

}  // namespace
}  // namespace tessera::models
