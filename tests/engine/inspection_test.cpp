// Pictures of an engine: what its parameters are, and where their bytes are while units run.
#include "tessera/engine/inspection.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

using shard::ParamState;

const ParamReport& find(const Inspection& inspection, std::string_view name) {
  for (const ParamReport& param : inspection.params) {
    if (param.name == name) {
      return param;
    }
  }
  throw InternalError("no parameter " + std::string(name));
}

TEST(Inspection, SaysWhatAParameterIsAndHowItIsCut) {
  with_engines(3, [](Engine& engine, comm::Group& group) {
    auto body = engine.unit("body", affine(5, 7, 1, /*trainable=*/false));
    auto tail = engine.unit("tail", affine(7, 7, 2));
    engine.add_external(tail, body->weight);
    const Inspection inspection = inspect(engine);

    ASSERT_EQ(inspection.params.size(), 4U);
    const ParamReport& weight = find(inspection, "body.weight");
    EXPECT_EQ(weight.id, id_of(engine, "body.weight"));
    EXPECT_FALSE(weight.trainable);
    EXPECT_EQ(weight.num_units, 2);
    EXPECT_EQ(weight.sizes, (std::vector<std::int64_t>{7, 5}));
    EXPECT_EQ(weight.group, group.name());
    EXPECT_EQ(weight.rank, group.rank());
    EXPECT_EQ(weight.layout.num_ranks(), 3);
    // 35 elements: 12 per rank are a multiple of 16 bytes.
    EXPECT_EQ(weight.layout.numel(), 35);
    EXPECT_EQ(weight.layout.shard_numel(), 12);
    EXPECT_EQ(weight.layout.padded_numel(), 36);
    EXPECT_EQ(weight.layout.shard_bytes(), 48U);
    EXPECT_EQ(weight.layout.full_bytes(), 144U);
    EXPECT_EQ(weight.layout.dtype(), DType::kFloat32);
    EXPECT_EQ(weight.placement.parameter, Tier::kDevice);
    EXPECT_TRUE(find(inspection, "tail.weight").trainable);
    EXPECT_EQ(find(inspection, "tail.weight").num_units, 1);

    ASSERT_EQ(inspection.units.size(), 2U);
    const UnitReport& unit = inspection.units[1];
    EXPECT_EQ(unit.name, "tail");
    EXPECT_EQ(unit.type, "AffineImpl");
    EXPECT_EQ(unit.own,
              (std::vector<int>{id_of(engine, "tail.weight"), id_of(engine, "tail.bias")}));
    EXPECT_EQ(unit.external, (std::vector<int>{id_of(engine, "body.weight")}));
  });
}

TEST(Inspection, FollowsAParameterThroughItsUse) {
  Config config = quiet_config();
  config.set("persist.param_bytes", std::int64_t{0});
  with_engines(2, config, [](Engine& engine, comm::Group&) {
    auto body = engine.unit("body", affine(4, 4, 1));
    auto frozen = engine.unit("frozen", affine(4, 4, 2, /*trainable=*/false));
    Inspection inside;
    const at::Tensor weight = body->weight;
    auto look = engine.function("look", {weight}, [&](const at::Tensor& x) {
      inside = inspect(engine);
      return at::linear(x, weight);
    });

    const Inspection before = inspect(engine);
    EXPECT_EQ(find(before, "body.weight").state, ParamState::kReleased);
    EXPECT_EQ(find(before, "body.weight").version, 0U);
    EXPECT_FALSE(before.units[2].is_open);

    engine.backward(look(frozen(body(input(3, 4, 0)))).pow(2).mean());
    EXPECT_EQ(find(inside, "body.weight").state, ParamState::kAvailable);
    EXPECT_EQ(find(inside, "body.weight").num_users, 1);
    EXPECT_TRUE(inside.units[2].is_open);
    EXPECT_FALSE(inside.units[0].is_open);
    // The first pass has no plan: a unit that has run holds nothing.
    EXPECT_EQ(find(inside, "frozen.weight").state, ParamState::kReleased);
    EXPECT_EQ(find(inside, "frozen.weight").num_users, 0);
    EXPECT_GT(inside.units[0].forward.misses, 0U);
    EXPECT_EQ(inside.units[0].backward.misses, 0U);

    engine.step();
    const Inspection after = inspect(engine);
    EXPECT_EQ(find(after, "body.weight").num_users, 0);
    EXPECT_EQ(find(after, "body.weight").version, 1U);
    EXPECT_EQ(find(after, "frozen.weight").version, 0U);
    EXPECT_GT(after.units[0].backward.misses + after.units[0].backward.hits, 0U);
  });
}

TEST(Inspection, NamesLeavesAndWhatPersists) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto outer = engine.unit("outer", affine(4, 4, 1));
    auto inner = engine.unit("outer.inner", affine(4, 4, 2));
    engine.set_leaf("outer");
    {
      const at::NoGradGuard no_grad;
      outer(input(2, 4, 0));
    }
    const Inspection inspection = inspect(engine);
    EXPECT_TRUE(inspection.units[0].is_leaf);
    EXPECT_EQ(inspection.units[1].inside_leaf, "outer");
    // What a leaf gathers for the units inside stays theirs.
    EXPECT_EQ(inspection.units[0].own.size(), 2U);
    EXPECT_EQ(find(inspection, "outer.inner.weight").num_units, 1);
    EXPECT_TRUE(find(inspection, "outer.weight").persists);
  });
}

TEST(Inspection, IsTheSameInWordsAndAsJson) {
  with_engines(2, [](Engine& engine, comm::Group& group) {
    auto body = engine.unit("body", affine(5, 7, 1, /*trainable=*/false));
    const Inspection inspection = inspect(engine);
    const nlohmann::json document = nlohmann::json::parse(to_json(inspection));
    EXPECT_EQ(document["units"][0]["name"], "body");
    EXPECT_EQ(document["units"][0]["own"], nlohmann::json({"body.weight", "body.bias"}));
    const nlohmann::json& param = document["params"][0];
    EXPECT_EQ(param["name"], "body.weight");
    EXPECT_EQ(param["state"], to_string(ParamState::kReleased));
    EXPECT_EQ(param["shard_numel"], 20);
    EXPECT_EQ(param["padded_numel"], 40);
    EXPECT_EQ(param["trainable"], false);

    const std::string text = to_text(inspection);
    EXPECT_NE(text.find("body (AffineImpl)\n  body.weight fp32 [7, 5]: frozen; rank " +
                        std::to_string(group.rank()) + " of 2"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("has 20 of 40 padded elements"), std::string::npos) << text;
  });
}

TEST(Inspection, OutlivesItsEngine) {
  Inspection inspection;
  with_engines(1, [&](Engine& engine, comm::Group&) {
    auto body = engine.unit("body", affine(3, 3, 1));
    inspection = inspect(engine);
  });
  EXPECT_EQ(inspection.units.at(0).name, "body");
  EXPECT_EQ(find(inspection, "body.bias").layout.numel(), 3);
}

}  // namespace
}  // namespace tessera::testing
