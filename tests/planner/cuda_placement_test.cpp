// Plans for a device with memory of its own: places, who updates, and sums.
#include <algorithm>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/placement.h"
#include "tessera/shard/layout.h"
#include "tessera/tier/io_engine.h"
#include "tests/planner/small_models.h"

namespace tessera::planner {
namespace {

PlacementOptions on_cuda(Wish parameters = Wish::kAuto, Wish optimizer = Wish::kAuto) {
  PlacementOptions options;
  options.on_cuda = true;
  options.parameters = parameters;
  options.optimizer = optimizer;
  return options;
}

ModelShapes bf16_gpt() { return small_gpt(512, 3, 4000, DType::kBFloat16); }

bool is_small(const ModelShapes& model, std::size_t id) {
  return model.params[id].numel * static_cast<std::int64_t>(bytes_of(model.dtype)) <=
         kSmallParamBytes;
}

TEST(CudaPlacement, KeepsEverythingOnTheDeviceWithoutABudget) {
  const ModelShapes model = bf16_gpt();
  const Placement placement = make_placement(model, on_cuda(), 1);
  for (const ShardPlaces& each : placement.params) {
    EXPECT_EQ(each, (ShardPlaces{Place::kDevice, Place::kDevice, Place::kDevice, true}));
  }
  EXPECT_EQ(placement.host_memory_bytes(), 0);
  EXPECT_EQ(placement.link.h2d + placement.link.d2h, 0);
  EXPECT_EQ(placement.arena_bytes, 0);
  EXPECT_EQ(placement.num_update_slots, 0);
}

TEST(CudaPlacement, EverythingInHostMemoryLeavesSmallParametersOnTheDevice) {
  const ModelShapes model = bf16_gpt();
  const Placement placement = make_placement(model, on_cuda(Wish::kHost, Wish::kHost), 1);
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const ShardPlaces& each = placement.params[i];
    EXPECT_EQ(each.parameter, is_small(model, i) ? Place::kDevice : Place::kHost);
    EXPECT_EQ(each.states, is_small(model, i) ? Place::kDevice : Place::kHost);
    EXPECT_EQ(each.gradient, each.device_update ? Place::kDevice : Place::kHost);
  }
  EXPECT_NEAR(placement.cpu_share, 0.35, 0.15);
}

}  // namespace
}  // namespace tessera::planner
