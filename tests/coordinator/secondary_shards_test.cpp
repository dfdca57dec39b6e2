// Secondary shards: made of what was gathered, for one version, and refused for another.
#include "tessera/coordinator/secondary_shards.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/contains.h"

namespace tessera::coordinator {
namespace {

class SecondOn : public testing::TestWithParam<DeviceChoice> {};
INSTANTIATE_TEST_SUITE_P(Devices, SecondOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(SecondOn, GathersBringTheSameValuesAndOnlyTheFirstIsOfAllRanks) {
  for (const int second : {2, 3, 6}) {
    run_ranks(6, [&](Group& world) {
      const auto near = world.split(world.rank() / second, "near");
      // Every use gathers.
      CoordinatorFixture rank(world, mixed_model(), make_options(1 << 12, 0), GetParam(), nullptr,
                              {}, near.get());
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t before = world.wire_bytes().payload;
        rank.train();
        const std::uint64_t in_first = world.wire_bytes().payload - before;
        rank.train();  // of the same values
        const std::uint64_t in_second = world.wire_bytes().payload - before - in_first;
        EXPECT_EQ(in_second, 0U) << "step " << step;
        EXPECT_GT(near->wire_bytes().payload, 0U);
        rank.end_step_and_update();
      }
    });
  }
}

TEST(SecondaryShards, OfAnEarlierUpdateAreRefusedByName) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0));
    SecondaryShards second(world, rank.device(), rank.params());
    shard::Param& param = rank.params()[1];
    EXPECT_FALSE(second.has(param));
    std::vector<float> full(static_cast<std::size_t>(param.layout().padded_numel()));
    param.start_gather(full.data());
    param.finish_gather();
    second.keep(param, /*by_all=*/false);
    EXPECT_FALSE(second.has(param)) << "other ranks have not gathered it";
    second.keep(param, /*by_all=*/true);
    EXPECT_TRUE(second.has(param));
    param.release();
    param.set_updated(device::Pending());
    EXPECT_FALSE(second.has(param));
    try {
      std::ignore = second.gather(param, full.data());
      FAIL() << "a stale secondary shard was given";
    } catch (const InternalError& error) {
      EXPECT_HAS(std::string(error.what()), "secondary shard of parameter '" + param.name() + "'");
      EXPECT_HAS(std::string(error.what()), "is of update");
    }
  });
}

}  // namespace
}  // namespace tessera::coordinator
